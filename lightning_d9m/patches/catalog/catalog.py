"""Which ops are patched, which are offered, which need no patch and why.

The one source of what :func:`~lightning_d9m.patches.registration.patches_applied` registers, of
``d9m ops`` and of the documentation's list. It imports no torch.
"""

from collections.abc import Iterable

from lightning_d9m.errors import SettingError
from lightning_d9m.patches.catalog.exempt import EXEMPT
from lightning_d9m.patches.catalog.native import SWITCHING
from lightning_d9m.patches.catalog.op import Op
from lightning_d9m.patches.catalog.pooling import POOLING
from lightning_d9m.patches.catalog.resampling import RESAMPLING
from lightning_d9m.patches.catalog.scattering import SCATTERING
from lightning_d9m.patches.catalog.torch_docs import read_documentation

OPS: tuple[Op, ...] = tuple(
    sorted((*POOLING, *RESAMPLING, *SCATTERING, *EXEMPT, *SWITCHING), key=lambda op: op.name)
)


def find_op(name: str) -> Op:
    """Return the op of a name.

    Raises:
        SettingError: There is none.
    """
    for op in OPS:
        if op.name == name:
            return op
    near = [op.name for op in OPS if name.strip("_") in op.name]
    raise SettingError(
        f"The catalogue has no op {name!r}. "
        + (f"Similar: {', '.join(near)}. " if near else "")
        + "`d9m ops` lists the names."
    )


def select_ops(
    torch_version: str, exclude: Iterable[str] = (), include: Iterable[str] = ()
) -> tuple[Op, ...]:
    """Return the ops to patch.

    Args:
        torch_version: As ``torch.__version__`` gives it. Ops that this version needs no patch for
            are left alone.
        exclude: Names of ops to leave to torch.
        include: Names of ops whose replacement is offered, but not the default.

    Raises:
        SettingError: A name is not in the catalogue, or names an op that has no replacement.
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
    """Read which ops torch says it refuses when deterministic algorithms are on.

    Args:
        docstring: That of ``torch.use_deterministic_algorithms``.

    Returns:
        Names such as ``torch.nn.AvgPool3d``; for an op with a list of modes one name for each, such
        as ``torch.nn.functional.interpolate bilinear``; of what is said of Apple's devices alone
        such as ``torch.kthvalue (MPS)``. Sorted.

    Raises:
        SettingError: The docstring has no such list any more, so that nothing can be checked.
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
    """Return what torch says it refuses and the catalogue neither patches nor exempts."""
    known = {name for op in OPS for name in op.documented}
    return tuple(name for name in read_raising_ops(docstring) if name not in known)
