"""Workloads of the patches: the cases of ``d9m audit ops`` with the largest inputs.

Each workload is one call of a patched op on a device. Gradients are called without the forward
pass.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lightning_d9m.ops.patches.catalog.catalog import FlagEffect, Op, select_ops
from lightning_d9m.tools.audit.ops.cases import Case, Inputs, list_cases

Call = Callable[[], Tensor | tuple[Tensor, ...]]
# There is no replacement; this measures whether topk varies, and what torch's sort costs a lookup.
TORCHS = ("topk", "embedding_dense_backward")
IMAGE, WIDE_IMAGE = (4, 8), (4, 128)  # samples and channels of the audit, and here


@dataclass(frozen=True)
class Workload:
    """One op on one shape.

    Attributes:
        op: The name in the catalog, or a more exact one.
        shape: A description of the shape.
        make: Builds the inputs on a device and returns the call.
        make_deterministic: Builds torch's own deterministic version, if there is one; called with
            deterministic algorithms on.
    """

    op: str
    shape: str
    make: Callable[[str], Call]
    make_deterministic: Callable[[str], Call] | None = None


class DeviceInputs(Inputs):
    """Draws each shape once, on the device; images have more channels there."""

    def normal(self, *shape: int) -> Tensor:
        """Draw from the standard normal distribution."""
        if self.device == "cuda" and shape[:2] == IMAGE:
            shape = WIDE_IMAGE + shape[2:]
        return _draw(0, shape, self.dtype, self.device).clone()

    def whole(self, high: int, *shape: int) -> Tensor:
        """Draw integers from 0 to ``high`` - 1."""
        return _draw(high, shape, torch.int64, self.device).clone()


@lru_cache(maxsize=64)
def _draw(high: int, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    # On the CPU of a CUDA machine the numbers are the device's.
    place = "cuda" if torch.cuda.is_available() else "cpu"
    draws = torch.Generator(place).manual_seed(int(bool(high)))
    if high:
        return torch.randint(high, shape, generator=draws, device=place).to(device)
    return torch.randn(shape, generator=draws, device=place, dtype=dtype).to(device)


def _make_workload(case: Case, op: Op | None) -> Workload:
    def make(device: str) -> Call:
        return case.make(DeviceInputs(device, torch.get_default_dtype()))

    effects = {FlagEffect.SWITCHES, FlagEffect.DECOMPOSES}
    switches = op.flag_effect in effects if op else case.op in TORCHS
    shape = ", ".join(f"{name}={value}" for name, value in case.parameters.items())
    return Workload(case.op, shape, make, make if switches else None)


def list_workloads() -> list[Workload]:
    """Return the cases of each patched op, and of some of torch's own, with the largest inputs."""
    patched, found = select_ops(torch.__version__), dict[str, list[tuple[Case, Op | None]]]()
    for case in list_cases():
        op = next((op for op in patched if case.op.startswith(op.name)), None)
        if op or case.op in TORCHS or case.op.startswith("scatter_reduce"):
            found.setdefault(case.op, []).append((case, op))
    return [
        _make_workload(case, op)
        for ones in found.values()
        for case, op in ones
        if _read_size(case) == max(_read_size(other) for other, _ in ones)
    ]


def _read_size(case: Case) -> float:
    return float(next(iter(case.parameters.values())))


WORKLOADS = list_workloads()
