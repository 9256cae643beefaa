"""The mode: classes, refusals, and the same bits under all settings of this machine."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event

import pytest
import torch
from portable_cases import CASES, CONTROLS
from torch.nn import functional as F

import lightning_d9m
from lightning_d9m.errors import NotPortableError
from lightning_d9m.ops.portability import is_portable
from lightning_d9m.ops.portability.mode import portable

SCRIPT = Path(__file__).parents[1] / "support" / "portable_cases.py"
GOLDEN = SCRIPT.with_name("portable_digests.json")
INDEX = torch.tensor([[0, 1, 0], [0, 2, 0], [3, 2, 0], [0, 0, 1]])
BAGS = torch.tensor([[0, 2], [1, 1]])
# What is drawn differs from torch's own draws.
DRAWN = {"RReLU", "FractionalMaxPool2d(2, output_size=3)", "attention dropout", "dropout"}
DRAWN |= {"alpha_dropout", "RNN", "GRU", "LSTM", "packed", "transformer", "draws", "sparse_"}
DRAWN |= {
    name for name in CASES if name.startswith(("kaiming", "xavier", "uniform", "trunc", "ortho"))
}


def run_cases(forking_python, *arguments, **variables):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("ATEN_CPU_CAPABILITY", None)
    command = [forking_python, SCRIPT, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment | variables
    )
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def digests(forking_python):
    return run_cases(forking_python)


def test_the_digests_are_those_of_every_machine(digests):
    """They were the same with torch 2.4 to 2.15, except what torch itself computes anew."""
    new = {"cumprod", "trunc_normal_"} if torch.__version__ < "2.13" else set()
    assert {name: digest for name, digest in digests.items() if name not in new} == {
        name: digest for name, digest in json.loads(GOLDEN.read_text()).items() if name not in new
    }


# MKL reads its variable when it is loaded, torch its own at the first operation.
OTHER = {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "2", "MKL_CBWR": "COMPATIBLE"}
OTHER["ONEDNN_MAX_CPU_ISA"] = "SSE41"


def test_the_bits_are_the_same_under_other_settings(forking_python, digests):
    assert run_cases(forking_python, **OTHER) == digests


@pytest.fixture(scope="module")
def controls(forking_python):
    return [run_cases(forking_python, "--controls", **variables) for variables in ({}, OTHER)]


@pytest.mark.parametrize("name", CONTROLS)
def test_a_class_that_is_left_to_torch_differs_between_settings(controls, name):
    """It was seen on AMD with AVX2; on a machine with one kind of instructions nothing differs."""
    one, other = (found[name] for found in controls)
    assert {case: digest for case, digest in one.items() if len(digest) != 16} == {}
    assert [case for case in one if one[case] != other[case]] != []


def train(name, **options):
    torch.manual_seed(2)
    model = torch.nn.Linear(5, 3)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = getattr(torch.optim, name)(model.parameters(), 0.1, weight_decay=0.2, **options)
    for _ in range(3):
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
        average.update_parameters(model)
    return torch.stack([model.weight.detach(), average.module.weight.detach()])


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_fused_steps_are_those_of_single_tensors(name):
    with portable():
        found = [
            train(name, maximize=True, **{key: key == "fused"}) for key in ("foreach", "fused")
        ]
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_steps_for_a_graph_are_those_of_torch(name):
    """Torch refuses them on the CPU."""
    with portable(), pytest.raises(AssertionError, match="capturable=True"):
        train(name, foreach=False, capturable=True)


def test_no_device_chooses_the_formula_of_an_optimizer_or_an_average(monkeypatch):
    """On a CUDA device both take formulas for lists of tensors, which round otherwise."""
    found = {}
    for device in ("none", "cpu"):
        for own in ("optimizer", "swa_utils"):
            module = sys.modules[f"torch.optim.{own}"]
            name = "_get_foreach_kernels_supported_devices"
            monkeypatch.setattr(module, name, lambda device=device: [device])
        with portable():
            found[device] = train("NAdam")
        found[device, "torch"] = train("NAdam")
    assert torch.equal(found["none"], found["cpu"])
    without, with_lists = found["none", "torch"], found["cpu", "torch"]
    assert [torch.equal(*pair) for pair in zip(without, with_lists, strict=True)] == [False, False]


def test_results_are_those_of_torch(forking_python):
    errors = run_cases(forking_python, "--errors", *(name for name in CASES if name not in DRAWN))
    loose = {"autocast": 0.05}
    assert {name: e for name, e in errors.items() if not e <= loose.get(name, 2e-4)} == {}


def test_an_operation_in_no_class_is_refused_with_its_line():
    with portable(), pytest.raises(NotPortableError, match="linalg_svd") as caught:
        torch.linalg.svd(torch.ones(2, 2))
    assert caught.value.op == "aten._linalg_svd.default"
    assert caught.value.source.startswith(__file__)


UNSEEN = {
    "fft": lambda: torch.fft.fft(torch.ones(4)),
    "complex": lambda: torch.ones(4, dtype=torch.complex64).sum(),
    "sparse": lambda: torch.ones(4).to_sparse().sum(),
    "poisson": lambda: torch.poisson(torch.ones(4)),
    "bessel": lambda: torch.special.bessel_j0(torch.ones(4)),
    "sparse bags": lambda: F.embedding_bag(BAGS, torch.ones(3, 2, requires_grad=True), sparse=True),
    "greatest": lambda: F.embedding_bag(BAGS, torch.ones(3, 2), mode="max"),
    "batch": lambda: torch.linalg.qr(torch.ones(2, 3, 3)),
    "rank": lambda: torch.linalg.qr(torch.ones(3, 3)),
    "product": lambda: torch.ones(4, 3).scatter_reduce(0, INDEX, torch.ones(4, 3), "prod"),
}


@pytest.mark.parametrize("call", UNSEEN.values(), ids=UNSEEN)
def test_what_would_pass_unseen_is_refused(call):
    with portable(), pytest.raises(NotPortableError):
        call()


NUMBERS = torch.tensor([[2**40 + 1, 3], [5, -7]])
FRACTIONS = torch.tensor([1.75, 2.5, 3.9])
WHOLE = {
    "unique": lambda: torch.unique(torch.tensor([3, 1, 3]), return_counts=True)[1],
    "mm": lambda: NUMBERS @ NUMBERS,
    "addmm": lambda: torch.addmm(NUMBERS, NUMBERS, NUMBERS),
    "conv2d": lambda: F.conv2d(torch.full((1, 1, 3, 3), 2**30 + 1), torch.ones(1, 1, 3, 3).long()),
    **{
        name: lambda name=name: getattr(FRACTIONS, name)(0, dtype=torch.int32)
        for name in ("sum", "cumsum", "prod", "cumprod")
    },
}


@pytest.mark.parametrize("call", WHOLE.values(), ids=WHOLE)
def test_whole_numbers_are_exact(call):
    """Also fractions that become whole numbers before they are added."""
    expected = call()
    with portable():
        found = call()
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


def test_bits_that_are_no_number_are_read_as_they_are():
    """Codes of 4 bits in a buffer of bfloat16 numbers are NaNs, and their memory stays."""
    bits = torch.tensor([0x7FC00001, -1], dtype=torch.int32)
    with portable():
        assert bits.view(torch.float32).view(torch.int32).tolist() == [0x7FC00001, -1]
    assert bits.tolist() == [0x7FC00001, -1]


ONES = torch.ones(3)
WRONG = {
    "median": (lambda: torch.ones(0, 3).median(0), "non-zero size"),
    "topk": (lambda: ONES.topk(5), "selected index k out of range"),
    "kthvalue": (lambda: ONES.kthvalue(5), "selected number k out of range"),
    "histc": (lambda: torch.histc(ONES * torch.nan), "is not finite"),
    "in place": (lambda: torch.tensor([1, 2]).exp_(), "can't be cast to the"),
    "in place by others": (lambda: torch.tensor([1, 2]).logit_(), "can't be cast to the"),
    "out": (lambda: torch.div(ONES, 2, out=torch.empty(3).long()), "can't be cast to the"),
    "types": (lambda: ONES.index_put((INDEX[0],), ONES.double(), accumulate=True), "dtypes match"),
    "uniform": (lambda: torch.empty(2).uniform_(2, 1), "found from=2 > to=1"),
    "normal": (lambda: torch.empty(2).normal_(0, -1), "expects std >= 0.0"),
    "exponential": (lambda: torch.empty(2).exponential_(-1), "expects lambda > 0.0"),
    "bernoulli": (lambda: torch.bernoulli(ONES * 1.5), "p_in <= 1"),
    "multinomial": (lambda: torch.multinomial(ONES * torch.nan, 1), "`inf`, `nan` or element < 0"),
    "too many": (lambda: torch.multinomial(ONES, 5), "cannot sample n_sample"),
}


@pytest.mark.parametrize(("call", "words"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_named_by_torch(call, words):
    with pytest.raises((RuntimeError, IndexError), match=words) as expected:
        call()
    with portable(), pytest.raises(expected.type, match=words):
        call()


MOVED = {
    "allclose": lambda: torch.tensor(torch.allclose(ONES, ONES + 1e-9)),
    "window": lambda: torch.hamming_window(5),
    "mask": lambda: torch.autograd.functional.vjp(
        lambda x: torch.zeros(3).masked_scatter(ONES > 0, x), ONES, ONES * 2
    )[1],
    "tangent": lambda: torch.func.jvp(torch.sin, (ONES,), (ONES,))[1],
    "hessian": lambda: torch.func.hessian(lambda x: (x**3).abs().square().sum())(ONES),
    "probability": lambda: torch.bernoulli(ONES, 1.0),
    "export": lambda: (
        torch.export.export(torch.nn.Linear(3, 1), (ONES,)).module()(ONES).new_ones(())
    ),
}


@pytest.mark.parametrize("call", MOVED.values(), ids=MOVED)
@pytest.mark.filterwarnings("ignore:.torch.jit.script")
def test_what_only_moves_or_calls_others_is_not_refused(call):
    expected = call()
    with portable():
        found = call()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["gelu", "exp", "sqrt", "batch_norm"])
def test_memory_keeps_the_order_of_the_dimensions(name):
    """A program may view it."""
    image = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    given = (image, None, None, None, None, True) if name == "batch_norm" else (image,)
    function = getattr(F, name, None) or getattr(torch, name)
    with portable():
        assert function(*given).stride() == image.stride()


def test_switches_are_restored():
    flags = (
        torch._C._get_mkldnn_enabled,
        torch.backends.cuda.flash_sdp_enabled,
        torch.are_deterministic_algorithms_enabled,
    )
    before = [flag() for flag in flags]
    with pytest.raises(RuntimeError, match="body"), lightning_d9m.portable():
        assert is_portable()
        with lightning_d9m.portable():
            assert is_portable()
        assert is_portable()
        assert [flag() for flag in flags] == [False, False, True]
        raise RuntimeError("body")
    assert not is_portable()
    assert [flag() for flag in flags] == before
    assert torch.ones(2).sum() == 2


def test_threads_share_the_switches():
    """The first block that opens sets them, and the last one that closes restores them."""
    before, left, opened = torch._C._get_mkldnn_enabled(), Event(), Event()

    def compute():
        with portable():
            opened.set()
            left.wait(20)
            return torch._C._get_mkldnn_enabled()

    with ThreadPoolExecutor(1) as pool:
        with portable():
            found = pool.submit(compute)
            opened.wait(20)
        assert not torch._C._get_mkldnn_enabled()
        left.set()
        assert found.result() is False
    assert torch._C._get_mkldnn_enabled() is before


def test_threads_take_operations_apart_at_once():
    """They were counted together, and refused as if one of them would not end."""

    def compute(_):
        with portable():
            return [F.huber_loss(NUMBERS * 0.1, NUMBERS * 0.2).item() for _ in range(20)]

    with ThreadPoolExecutor(16) as pool:
        found = [*pool.map(compute, range(32))]
    assert len({tuple(one) for one in found}) == 1


def test_the_last_number_at_a_place_stays():
    """Two threads of torch write to one place in any order, unless its flag is on."""
    places, numbers = torch.arange(400_000) % 5, torch.arange(400_000.0)
    with lightning_d9m.portable():
        for _ in range(5):
            written = torch.zeros(5)
            written[places] = numbers
            assert written.tolist() == numbers[-5:].tolist()


def test_a_convolution_without_input_channels_is_its_bias():
    with lightning_d9m.portable():
        found = F.conv2d(torch.rand(1, 0, 4, 4), torch.rand(2, 0, 3, 3), torch.ones(2))
    assert found.eq(1).all()


def test_zero_has_one_sign_where_processors_disagree():
    zeros = torch.tensor([0.0, -0.0])
    with portable():
        found = [zeros.relu(), zeros.amax(), zeros.max(), zeros.sum()]
    assert not any(bool(torch.signbit(one).any()) for one in found)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_images_of_width_1_are_resized_with_antialiasing(mode):
    """Torch 2.13 gives every line the value of the first one; lines are resized well."""
    image = torch.randn(1, 2, 9, 3, generator=torch.Generator().manual_seed(0))
    with portable():
        found = F.interpolate(image, (4, 1), mode=mode, antialias=True)
    expected = F.interpolate(image.mT, (1, 4), mode=mode, antialias=True).mT
    torch.testing.assert_close(found, expected)


# The rows have more places than the longest label.
LABELS = (torch.tensor([[1, 2, 0, 0], [3, 3, 1, 0]]), torch.tensor([9, 8]), torch.tensor([2, 3]))
WEIGHT = torch.randn(3, 2, 3, 2, generator=torch.Generator().manual_seed(1))


def _add_batch(values, shape):
    others = torch.arange(16.0).view(2, 4, 2) - 7
    return torch.addbmm(torch.ones(shape), values, others, beta=0.5, alpha=3)


def _scatter(values, kind):
    return values.scatter_reduce(0, INDEX, values.flip(0) * 3, kind)


def _put(values, key, number):
    changed = values.clone()
    changed[key] = number
    return changed


def _transpose(values, *more):
    return F.conv_transpose2d(values, WEIGHT, None, *more, dilation=3)


EDGES = {
    "unbatched pooling": (lambda x: F.adaptive_max_pool3d(x, 2), (2, 4, 3, 5)),
    "overlapping windows": (lambda x: F.max_pool2d(x, 3, 2, 1), (2, 3, 9, 8)),
    "narrow image": (lambda x: F.max_pool2d(x, (3, 2), 1, 1), (2, 7, 2)),
    "dilated windows": (lambda x: F.max_pool3d(x, 3, 1, 1, 2, ceil_mode=True), (2, 7, 6, 5)),
    "margins of one": (lambda x: F.multi_margin_loss(x, torch.tensor(0)), ()),
    "labels of one": (lambda x: F.multilabel_margin_loss(x, torch.tensor(0)), ()),
    "padded labels": (lambda x: F.ctc_loss(x.log_softmax(2), *LABELS), (9, 2, 4)),
    "labels without a batch": (
        lambda x: F.ctc_loss(x.log_softmax(1), LABELS[0][0, :2], *torch.tensor([9, 2])),
        (9, 4),
    ),
    **{
        f"labels without a step, {count}": (
            lambda x, count=count: F.ctc_loss(
                x.log_softmax(2), LABELS[0], (0, 8), (count, 3), reduction="none"
            ).nan_to_num(posinf=7.0),
            (9, 2, 4),
        )
        for count in (0, 2)
    },
    **{
        f"scattered {name}": (lambda x, name=name: _scatter(x, name), (4, 3))
        for name in ("sum", "mean", "amax")
    },
    "indexed mean": (lambda x: x.index_reduce(0, INDEX[:, 0], x.flip(0) * 3, "mean"), (4, 3)),
    "activations": (lambda x: torch.hypot(x, x * 2) + F.silu(x) + F.gelu(x), (5,)),
    "counted distances": (lambda x: torch.cdist(x, x.flip(0), p=0.0) * x.sum(), (4, 3)),
    "prod of one": (lambda x: x.prod(0, keepdim=True), ()),
    "infinite terms": (lambda x: (x * 0).norm(-0.5), (5,)),
    "added to one": (lambda x: x.scatter_add(0, torch.tensor(0), x * 2), ()),
    "put of one": (lambda x: torch.zeros(()).put(torch.tensor([0]), x, accumulate=True), ()),
    "padded by a stride": (lambda x: _transpose(x, 2, 1, (2, 1)), (2, 3, 4, 5)),
    "padded by two strides": (lambda x: _transpose(x, 1, 0, 2), (2, 3, 4, 5)),
    "softmax of none": (lambda x: x.softmax(0) + x.log_softmax(0), (0, 5)),
    "pooling of none": (lambda x: F.avg_pool2d(x, 2), (0, 3, 4, 5)),
    "resizing of none": (
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        (0, 3, 4, 5),
    ),
    **{
        f"{name} of one": (lambda x, name=name: getattr(x, name)(0)[0], ())
        for name in ("median", "sort", "max")
    },
    "kthvalue of one": (lambda x: x.kthvalue(1, 0, keepdim=True)[0] + x.topk(1)[0], ()),
    "scan of one": (lambda x: x.cumsum(0) + x.cumprod(-1), ()),
    "reflected": (lambda x: F.pad(x, (3, 4), "reflect"), (2, 3, 5)),
    "replicated": (lambda x: F.pad(x, (1, 2, 1, 2, 1, 2), "replicate"), (1, 2, 3, 3, 3)),
    "replicated widely": (lambda x: F.pad(x, (2, 2), "replicate"), (2, 3, 20)),
    "columns written": (lambda x: _put(x, (slice(None), INDEX[0]), 1.0), (4, 3)),
    "columns": (lambda x: x[:, INDEX[0]] * torch.arange(3.0), (4, 3)),
    "rows": (lambda x: x[INDEX[0]] * torch.arange(3.0), (40, 3)),
    "none": (lambda x: x.gather(0, torch.zeros(2, 0, dtype=torch.uint8)).sum() + x, (5,)),
    "rows and columns": (lambda x: x[INDEX, :, INDEX] * torch.arange(5.0), (4, 5, 4)),
    "masked": (lambda x: x[INDEX > 0] * 2, (4, 3, 2)),
    **{
        f"start of {shape}": (lambda x, s=shape: _add_batch(x, s), (2, 3, 4))
        for shape in ((), (1,), (2,), (3, 1))
    },
}


AXES = torch.arange(4).view(4, 1, 1, 1), torch.arange(3).view(1, 3, 1, 1)
READ = {
    "samples and channels": (*AXES, INDEX[:, None, :, None], torch.tensor([0, -1, 3])),
    "samples": (AXES[0], AXES[1].flip(1), INDEX[:, None, :, None], torch.tensor([0, -1, 3])),
    "turned": (
        AXES[0].view(1, 4, 1, 1),
        AXES[1].view(3, 1, 1, 1),
        torch.tensor(-4),
        torch.tensor(1),
    ),
    "short": (AXES[0].int(), AXES[1].int(), INDEX.int(), INDEX.int()[:1]),
    "other shapes": (INDEX, INDEX % 3, INDEX - 4, INDEX),
    "two": (INDEX, INDEX % 3),
}


@pytest.mark.parametrize("indices", READ.values(), ids=READ)
def test_reads_are_those_of_torch(indices):
    values = torch.arange(4.0 * 3 * 4 * 5).view(4, 3, 4, 5)
    for one in (values, values.transpose(2, 3).contiguous().transpose(2, 3)):
        expected = one[indices]
        with portable(), torch.device("meta"):  # a default device has no effect
            found = one[indices]
        assert torch.equal(found, expected)
        assert found.is_contiguous() or len(indices) < values.dim()


@pytest.mark.parametrize("place", [5, -5])
def test_a_place_outside_has_torchs_error(place):
    with portable(), pytest.raises(IndexError, match="out of bounds for dimension 0 with size 4"):
        torch.ones(4, 3)[torch.tensor([0, place]), torch.tensor([1])]


ADDED = {
    "index_add_": lambda x, ones: x.index_add_(0, INDEX[0], ones(3, 3)),
    "scatter_add_": lambda x, ones: x.scatter_add_(0, INDEX, ones(4, 3)),
    "index_put_": lambda x, ones: x.index_put_((INDEX[0],), ones(()), accumulate=True),
    "columns": lambda x, ones: x.t().index_put_((INDEX[3],), ones(()), accumulate=True).t(),
    "put_": lambda x, ones: x.put_(INDEX[3], ones(3), accumulate=True),
    "scattered": lambda x, ones: x.scatter_reduce(0, INDEX, ones(4, 3), "mean"),
}


@pytest.mark.parametrize("add", ADDED.values(), ids=ADDED)
def test_sums_at_places_of_16_bits_are_computed_by_torch_operations(add):
    """The mode does not take the operations apart that compute what no C does."""
    values = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    ones = partial(torch.ones, dtype=values.dtype)
    with portable():
        found = add(values.clone(), ones)
    torch.testing.assert_close(found, add(values.clone(), ones))


@pytest.mark.parametrize("add", ADDED.values(), ids=ADDED)
def test_places_without_a_term_are_not_written(add):
    """A sum in a large table takes as long as its terms: the rest keeps its bits, as -0.0."""
    values = torch.full((40, 3), -0.0)
    expected = add(values.clone(), torch.ones)
    ones = partial(torch.ones, device="cpu")
    with portable(), torch.device("meta"):  # a default device has no effect
        found = add(values, ones)
    assert torch.equal(found.signbit(), expected.signbit())
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("function", "shape"), EDGES.values(), ids=EDGES)
@pytest.mark.filterwarnings("ignore:index_reduce")
def test_edges_are_those_of_torch(function, shape):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    expected = function(values)
    (gradient,) = torch.autograd.grad(expected.sum(), values)
    with portable():
        found = function(values)
        (found_gradient,) = torch.autograd.grad(found.sum(), values)
    torch.testing.assert_close(found, expected, equal_nan=True)
    torch.testing.assert_close(found_gradient, gradient, equal_nan=True)
