"""The catalog: ops that are patched, ops that are patched on request, and ops that need no patch.

:func:`~lightning_d9m.patches.registration.patches_applied`, ``d9m ops`` and docs/ops.md are made
from it. It does not import torch.
"""

from collections.abc import Iterable

from lightning_d9m.errors import SettingError
from lightning_d9m.patches.catalog.exempt import EXEMPT
from lightning_d9m.patches.catalog.op import Op
from lightning_d9m.patches.catalog.scattering import SCATTERING
from lightning_d9m.patches.catalog.spatial import SPATIAL

OPS: tuple[Op, ...] = tuple(sorted((*SPATIAL, *SCATTERING, *EXEMPT), key=lambda op: op.name))


def find_op(name: str) -> Op:
    """Return the op with a name.

    Raises:
        SettingError: The catalog has no such op.
    """
    for op in OPS:
        if op.name == name:
            return op
    near = [op.name for op in OPS if name.strip("_") in op.name]
    raise SettingError(
        f"The catalog has no op {name!r}. "
        + (f"Similar: {', '.join(near)}. " if near else "")
        + "`d9m ops` lists the names."
    )


def select_ops(
    torch_version: str, exclude: Iterable[str] = (), include: Iterable[str] = ()
) -> tuple[Op, ...]:
    """Return the ops to patch.

    Args:
        torch_version: ``torch.__version__``. Ops that need no patch in this version are skipped.
        exclude: Names of ops to leave to torch.
        include: Names of ops that are patched on request only.

    Raises:
        SettingError: A name is not in the catalog, or the op has no replacement.
    """
    excluded, included = set(exclude), set(include)
    for name in sorted(excluded | included):
        op = find_op(name)
        if not op.kernels:
            raise SettingError(
                f"{name!r} cannot be excluded or included, because nothing replaces it: {op.reason}"
            )
    both = sorted(excluded & included)
    if both:
        raise SettingError(f"{both[0]!r} is both excluded and included. Name it once.")
    return tuple(
        op
        for op in OPS
        if (op.status == "patched" or op.name in included)
        and op.name not in excluded
        and op.is_needed(torch_version)
    )
