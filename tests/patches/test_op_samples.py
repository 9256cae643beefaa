"""torch's own samples of the patched ops: the same outputs and gradients, or the same error."""

from itertools import islice
from typing import TYPE_CHECKING

import pytest
import torch
from patches.cases import deterministic_algorithms
from torch import Tensor
from torch.utils._pytree import tree_flatten

from lightning_d9m.patches.registration import patches_applied

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

NAMES = """
    bincount histc index_add index_put index_reduce median nanmedian
    nn.functional.adaptive_avg_pool2d nn.functional.adaptive_avg_pool3d
    nn.functional.adaptive_max_pool1d nn.functional.adaptive_max_pool2d
    nn.functional.adaptive_max_pool3d nn.functional.avg_pool3d nn.functional.ctc_loss
    nn.functional.embedding nn.functional.embedding_bag nn.functional.fractional_max_pool2d
    nn.functional.fractional_max_pool3d nn.functional.grid_sample nn.functional.interpolate
    nn.functional.max_pool3d nn.functional.max_unpool1d nn.functional.max_unpool2d
    nn.functional.max_unpool3d nn.functional.nll_loss nn.functional.pad
    nn.functional.upsample_bilinear put scatter scatter_add scatter_reduce
""".split()  # noqa: SIM905 - a table is easier to read
MOST = 4


@pytest.fixture(scope="module")
def infos() -> "list[OpInfo]":
    """Return torch's list of ops, which takes two seconds to import."""
    from torch.testing._internal.common_methods_invocations import op_db

    # The import freezes torch's flags for the whole process; other tests set them.
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
    return op_db


pytestmark = pytest.mark.usefixtures("one_thread")


def evaluate(info: "OpInfo", sample: "SampleInput") -> tuple[list[Tensor], list[Tensor]] | str:
    """Return the outputs, and the inputs that need gradients; or the error's words."""
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
    return [part for part in tree_flatten(outputs)[0] if isinstance(part, Tensor)], leaves


def differentiate(evaluated: tuple[list[Tensor], list[Tensor]] | str) -> list[Tensor] | str:
    """Add the gradients of the sum of the squares to the outputs."""
    if isinstance(evaluated, str):
        return evaluated
    outputs, leaves = evaluated
    smooth = [part for part in outputs if part.requires_grad]
    if not smooth or not leaves:
        return outputs
    total = sum(part.square().sum() for part in smooth)
    return [*outputs, *torch.autograd.grad(total, leaves, allow_unused=True)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_samples_agree(name: str, infos: "list[OpInfo]") -> None:
    """In float64: 1e-10, thousands of roundings of sums of at most some hundred terms of order 1.

    The gradient is taken both with the patches on throughout, and with forward unpatched.
    """
    others = {"constant", "circular", "amax", "amin", "mean"}
    if name == "index_reduce":  # all its reductions are replaced
        others = set()
    found = [info for info in infos if info.name == name and info.variant_test_name not in others]
    assert found, "torch has renamed it"
    for info in found:
        compare_samples(info)


def compare_samples(info: "OpInfo") -> None:
    """Compare the first samples of an op, or of a variant of it."""
    dtype = torch.float64 if info.supports_dtype(torch.float64, "cpu") else torch.int64
    offered = info.sample_inputs("cpu", dtype, requires_grad=info.supports_autograd)
    samples = list(islice(offered, MOST))
    assert samples, info
    expected = [differentiate(evaluate(info, sample)) for sample in samples]
    unpatched = [evaluate(info, sample) for sample in samples]
    with patches_applied("CPU"), deterministic_algorithms():
        backward = [differentiate(evaluated) for evaluated in unpatched]
    with patches_applied("CPU"):
        throughout = [differentiate(evaluate(info, sample)) for sample in samples]
    for answer, right in zip([*backward, *throughout], expected * 2, strict=True):
        if isinstance(right, str):
            assert answer == right, info
        else:
            torch.testing.assert_close(answer, right, rtol=1e-10, atol=1e-10, equal_nan=True)
