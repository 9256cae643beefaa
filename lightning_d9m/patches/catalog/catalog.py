"""The catalog: ops that are patched, ops that are patched on request, and ops that need no patch.

:func:`~lightning_d9m.patches.registration.patches_applied`, ``d9m ops`` and docs/ops.md are made
from it. It does not import torch.
"""

from collections.abc import Iterable

from lightning_d9m.errors import SettingError
from lightning_d9m.patches.catalog.exempt import EXEMPT
from lightning_d9m.patches.catalog.native import NATIVE
from lightning_d9m.patches.catalog.op import Op
from lightning_d9m.patches.catalog.pooling import POOLING
from lightning_d9m.patches.catalog.resampling import RESAMPLING
from lightning_d9m.patches.catalog.scattering import SCATTERING
from lightning_d9m.patches.catalog.torch_docs import read_documentation

OPS: tuple[Op, ...] = tuple(
    sorted((*POOLING, *RESAMPLING, *SCATTERING, *EXEMPT, *NATIVE), key=lambda op: op.name)
)


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


def read_raising_ops(docstring: str) -> tuple[str, ...]:
    """Return the ops that raise, by torch's documentation, when deterministic algorithms are on.

    Args:
        docstring: That of ``torch.use_deterministic_algorithms``.

    Returns:
        Names such as ``torch.nn.AvgPool3d``; for an op with a list of modes one name for each, such
        as ``torch.nn.functional.interpolate bilinear``; for an op that raises on Apple's devices
        only, such as ``torch.kthvalue (MPS)``. Sorted.

    Raises:
        SettingError: The docstring has no such list.
    """
    return tuple(
        sorted(
            {
                f"{line.name}{mode and f' {mode}'}{' (MPS)' if line.devices == ('mps',) else ''}"
                for line in read_documentation(docstring)
                if line.kind == "raises"
                for mode in line.modes or ("",)
            }
        )
    )


def find_unaccounted(docstring: str) -> tuple[str, ...]:
    """Return the documented raising ops that the catalog neither patches nor exempts."""
    known = {name for op in OPS for name in op.documented}
    return tuple(name for name in read_raising_ops(docstring) if name not in known)
