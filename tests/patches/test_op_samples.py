"""torch's own samples of the patched ops: the same outputs and gradients, or the same error."""

from itertools import islice

import pytest
import torch
from patches.cases import deterministic_algorithms
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_flatten

from lightning_d9m.patches.catalog.catalog import OPS
from lightning_d9m.patches.registration import patches_applied

# Importing torch's test library freezes torch's flags for the whole process; other tests set them.
torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True

NAMES = [
    "bincount",
    "histc",
    "index_add",
    "index_put",
    "index_reduce",
    "median",
    "nanmedian",
    "nn.functional.adaptive_avg_pool2d",
    "nn.functional.adaptive_avg_pool3d",
    "nn.functional.adaptive_max_pool1d",
    "nn.functional.adaptive_max_pool2d",
    "nn.functional.adaptive_max_pool3d",
    "nn.functional.avg_pool3d",
    "nn.functional.ctc_loss",
    "nn.functional.embedding",
    "nn.functional.embedding_bag",
    "nn.functional.fractional_max_pool2d",
    "nn.functional.fractional_max_pool3d",
    "nn.functional.grid_sample",
    "nn.functional.interpolate",
    "nn.functional.max_pool3d",
    "nn.functional.max_unpool1d",
    "nn.functional.max_unpool2d",
    "nn.functional.max_unpool3d",
    "nn.functional.nll_loss",
    "nn.functional.pad",
    "nn.functional.upsample_bilinear",
    "put",
    "scatter",
    "scatter_add",
    "scatter_reduce",
]
MOST = 24
OFFERED = [op.name for op in OPS if op.status == "offered"]
INFOS = [
    pytest.param(info, id=f"{info.name}-{info.variant_test_name}")
    for info in op_db
    if info.name in NAMES
    and (
        info.name == "index_reduce"  # all its reductions are replaced
        or info.variant_test_name not in {"constant", "circular", "amax", "amin", "mean"}
    )
]


pytestmark = pytest.mark.usefixtures("one_thread")


def run(info: OpInfo, sample: SampleInput, *, forward_too: bool) -> list[Tensor] | str:
    """Return the outputs, and the gradients of the sum of the squares; or the error's words."""
    torch.manual_seed(0)
    leaves = [
        leaf
        for leaf in tree_flatten((sample.input, sample.args, sample.kwargs))[0]
        if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    try:
        outputs = info(sample.input, *sample.args, **sample.kwargs)
    except (RuntimeError, IndexError) as error:
        return str(error)
    outputs = [part for part in tree_flatten(outputs)[0] if isinstance(part, Tensor)]
    smooth = [part for part in outputs if part.requires_grad]
    if not smooth or not leaves:
        return outputs
    total = sum(part.square().sum() for part in smooth)
    if forward_too:
        return [*outputs, *torch.autograd.grad(total, leaves, allow_unused=True)]
    with patches_applied("CPU", include=OFFERED), deterministic_algorithms():
        return [*outputs, *torch.autograd.grad(total, leaves, allow_unused=True)]


@pytest.mark.parametrize("info", INFOS)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_samples_agree(info: OpInfo) -> None:
    """In float64: 1e-10, thousands of roundings of sums of at most some hundred terms of order 1.

    The gradient is taken both with the patches on throughout, and with forward unpatched.
    """
    dtype = torch.float64 if info.supports_dtype(torch.float64, "cpu") else torch.int64
    samples = info.sample_inputs("cpu", dtype, requires_grad=info.supports_autograd)
    tried = 0
    for sample in islice(samples, MOST):
        expected = run(info, sample, forward_too=True)
        actual = [run(info, sample, forward_too=False)]
        with patches_applied("CPU", include=OFFERED):
            actual.append(run(info, sample, forward_too=True))
        for answer in actual:
            if isinstance(expected, str):
                assert answer == expected
            else:
                torch.testing.assert_close(answer, expected, rtol=1e-10, atol=1e-10, equal_nan=True)
        tried += 1
    assert tried


def test_every_name_is_in_torchs_list() -> None:
    """A name that torch renames would drop out of the test in silence."""
    assert set(NAMES) <= {info.name for info in op_db}
