"""Catalog entries of ops that torch itself makes deterministic when its flag is on.

They vary only while deterministic algorithms are off. The list is that of the docstring of
``torch.use_deterministic_algorithms``; attention and recurrent layers are in ``exempt``.
"""

from lightning_d9m.patches.catalog.op import ATOMICS, FlagEffect, Op

_SWITCHES = "Runs a deterministic version."
_REASON = "torch itself is deterministic if deterministic algorithms are on."
_LAST_WINS = "Several threads write to one place in no fixed order, and the last value stays."


def _make_entry(
    name: str,
    *documented: str,
    cause: str = ATOMICS,
    torch_does: str = _SWITCHES,
    operators: tuple[str, ...] = (),
) -> Op:
    return Op(
        name=name,
        status="exempt",
        flag_effect=FlagEffect.SWITCHES,
        documented=documented,
        torch_does=torch_does,
        cause=cause,
        reason=_REASON,
        operators=operators,
    )


NATIVE: tuple[Op, ...] = (
    _make_entry(
        "convolution",
        *(f"torch.nn.{kind}{dims}d" for kind in ("Conv", "ConvTranspose") for dims in (1, 2, 3)),
        cause="cuDNN's fastest algorithms for the gradients add with atomics.",
        torch_does="Selects cuDNN's deterministic algorithms.",
        operators=("convolution_backward",),
    ),
    _make_entry(
        "bmm_sparse",
        "torch.bmm",
        cause="cuSPARSE adds the products of a sparse matrix in no fixed order.",
        torch_does="Selects cuSPARSE's deterministic algorithm.",
    ),
    _make_entry(
        "index_put",
        "torch.Tensor.index_put",
        cause=_LAST_WINS,
        operators=("_unsafe_index_put",),
    ),
    _make_entry("scatter", "torch.Tensor.scatter", cause=_LAST_WINS),
    _make_entry("scatter_reduce_sum", "torch.Tensor.scatter_reduce"),
    _make_entry("index_copy", "torch.Tensor.index_copy", cause=_LAST_WINS),
    _make_entry("gather_backward", "torch.gather"),
    _make_entry("index_select_backward", "torch.index_select"),
    _make_entry("repeat_interleave_backward", "torch.repeat_interleave"),
)
