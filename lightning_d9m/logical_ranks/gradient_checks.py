"""Checks of the gradients of a parameter, before they are added to those of others."""

from typing import NoReturn

import torch
from torch import Tensor

from lightning_d9m.errors import SettingError


def make_dense(name: str, gradient: Tensor, *, allowed: bool) -> Tensor:
    """Return a gradient as a dense tensor.

    Raises:
        SettingError: It is sparse, and that is not allowed.
    """
    if gradient.layout is torch.strided:
        return gradient
    if not allowed:
        raise SettingError(
            f"The gradient of {name!r} is sparse ({gradient.layout}), and sums over logical "
            "ranks are dense: pass sparse_as_dense=True to sum it as a dense tensor, or build "
            "the embedding with sparse=False."
        )
    # coalesce() adds duplicates in sorted order; to_dense() alone adds them in any order.
    return gradient.coalesce().to_dense()


def refuse_stale(name: str) -> NoReturn:
    """Raise an error about a gradient that is still that of the last step."""
    raise SettingError(
        f"The gradient of {name!r} was added to that of the last step: begin each step with "
        "zero_grad(set_to_none=True)."
    )
