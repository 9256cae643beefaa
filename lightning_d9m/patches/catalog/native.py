"""The catalogue's entries for ops that torch itself makes deterministic when asked to.

They vary only while deterministic algorithms are off. The list is that of the docstring of
``torch.use_deterministic_algorithms``; attention and recurrent layers are in ``entries_exempt``.
"""

from lightning_d9m.patches.catalog.op import ATOMICS, FlagEffect, Op

_SWITCHES = "Runs a deterministic version."
_REASON = "torch itself does it, if deterministic algorithms are on."
_LAST_WINS = "Of several values for one place, whichever thread writes last wins."


def _describe(
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


SWITCHING: tuple[Op, ...] = (
    _describe(
        "convolution",
        *(f"torch.nn.{kind}{dims}d" for kind in ("Conv", "ConvTranspose") for dims in (1, 2, 3)),
        cause="cuDNN's fastest algorithms for the gradients add with atomics.",
        torch_does="Asks cuDNN for its deterministic algorithms.",
        operators=("convolution_backward",),
    ),
    _describe(
        "bmm_sparse",
        "torch.bmm",
        cause="cuSPARSE adds the products of a sparse matrix in no fixed order.",
        torch_does="Asks cuSPARSE for its deterministic algorithm.",
    ),
    _describe(
        "index_put",
        "torch.Tensor.index_put",
        cause=_LAST_WINS,
        operators=("_unsafe_index_put",),
    ),
    _describe("scatter", "torch.Tensor.scatter", cause=_LAST_WINS),
    _describe("scatter_reduce_sum", "torch.Tensor.scatter_reduce"),
    _describe("index_copy", "torch.Tensor.index_copy", cause=_LAST_WINS),
    _describe("gather_backward", "torch.gather"),
    _describe("index_select_backward", "torch.index_select"),
    _describe("repeat_interleave_backward", "torch.repeat_interleave"),
)
