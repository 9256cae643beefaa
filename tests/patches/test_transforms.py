"""Ops that are no gradient of one input, under what torch does to functions: as unpatched."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as nnf
from patches.cases import GRADIENT_CASES, answer
from torch import Tensor

from lightning_d9m.patches.registration import patches_applied

DRAWS = torch.Generator().manual_seed(3)
FIXED = torch.randn(7, 4, dtype=torch.float64, generator=DRAWS)
WHERE = torch.randint(0, 5, (7, 4), generator=DRAWS)
ROWS, TARGET = WHERE[:, 0], torch.randint(0, 4, (2, 3, 2), generator=DRAWS)
APART = torch.randperm(25, generator=DRAWS)[:20].view(5, 4)  # no two for one place
GRID = torch.rand(1, 3, 3, 2, dtype=torch.float64, generator=DRAWS)

# Of one tensor of shape (5, 4); the numbers differ by much, so that an order is stable.
CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "nll_loss2d": lambda x: nnf.nll_loss(
        x[:4, :, None].repeat(1, 1, 6).view(2, 4, 3, 4)[..., :2], TARGET
    ),
    "ctc_loss": lambda x: nnf.ctc_loss(x[:, None].log_softmax(2), ROWS[None, :2] % 3 + 1, [5], [2]),
    "embedding_bag": lambda x: nnf.embedding_bag(WHERE, x, mode="max"),
    "put": lambda x: x.put(torch.tensor([0, 3, 3, -1]), FIXED[0]),
    "put-source": lambda x: FIXED.put(APART, x),
    "put-accumulate": lambda x: FIXED.put(WHERE[:5], x, accumulate=True),
    "median": lambda x: x.median(0).values,
    "nanmedian": lambda x: x.nanmedian(1).values,
    "scatter_reduce": lambda x: x.scatter_reduce(0, WHERE, FIXED, "prod"),
    "scatter_reduce-sum": lambda x: x.scatter_reduce(0, WHERE, FIXED, "sum", include_self=False),
    "scatter_reduce-mean": lambda x: FIXED.scatter_reduce(0, WHERE[:5], x, "mean"),
    "scatter_reduce-mean-of-values": lambda x: FIXED.scatter_reduce(
        0, WHERE[:5], x, "mean", include_self=False
    ),
    "scatter_reduce-amax": lambda x: FIXED.scatter_reduce(0, WHERE[:5], x, "amax"),
    "scatter_reduce-source": lambda x: FIXED.scatter_reduce(0, WHERE[:5], x, "prod"),
    "index_reduce-prod": lambda x: x.index_reduce(0, ROWS, FIXED, "prod"),
    "index_reduce-mean": lambda x: x.index_reduce(0, ROWS, FIXED, "mean"),
    "index_reduce-amax": lambda x: x.index_reduce(0, ROWS, FIXED, "amax"),
    "max_unpool2d": lambda x: torch._C._nn.max_unpool2d(x[None], APART[None], [5, 5]),
    "max_unpool3d": lambda x: torch._C._nn.max_unpool3d(
        x[None, None], APART[None, None], [1, 5, 5], [1] * 3, [0] * 3
    ),
    "grid_sample": lambda x: nnf.grid_sample(x[None, None], GRID, align_corners=False),
    "grid_sample-grid": lambda x: nnf.grid_sample(
        FIXED[None, None], x.view(1, 5, 2, 2).sigmoid(), align_corners=False
    ),
    "histc": lambda x: x.histc(3),
    "bincount": lambda x: ROWS[:5].bincount(x[:, 0]),
    "scatter": lambda x: x.scatter(0, WHERE, FIXED, reduce="multiply"),
    "index_add": lambda x: x.index_add(0, ROWS, FIXED),
    "index_add-source": lambda x: FIXED.index_add(0, ROWS[:5], x),
    "scatter_add": lambda x: x.scatter_add(0, WHERE, FIXED),
    "index_put": lambda x: x.index_put((ROWS,), FIXED, accumulate=True),
    "getitem": lambda x: x[ROWS],
    "embedding": lambda x: nnf.embedding(WHERE, x),
}
COUNTS = {"histc", "bincount"}  # they have no derivative
SMALL = {case.label: case for case in GRADIENT_CASES if "-" not in case.label}
CASES |= {label: case.forward for label, case in SMALL.items()}
every_case = pytest.mark.parametrize("name", CASES)
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:index_reduce.* is in beta"),
    pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter"),
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
    pytest.mark.filterwarnings("ignore:Dynamo detected:UserWarning"),
]


def make_input(name: str = "") -> Tensor:
    """Return numbers that no step of a numerical derivative brings out of order."""
    shape = SMALL[name].shape if name in SMALL else (5, 4)
    count = torch.Size(shape).numel()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    return (order.double().view(shape) / 4 - count / 8 + 0.1).requires_grad_()


def find_call(name: str) -> Callable[[Tensor], Tensor]:
    """Return a call of what is patched: an op, or the gradient of one."""
    call = CASES[name]
    return torch.func.grad(lambda x: call(x).square().sum()) if name in SMALL else call


def both(attempt: Callable[[], object]) -> tuple[object, object]:
    """Return the answers without and with the patches."""
    expected = answer(attempt)
    with patches_applied("CPU"):
        return expected, answer(attempt)


def assert_close(expected: object, actual: object) -> None:
    """Results as close as sums in another order are; errors word for word."""
    if isinstance(expected[0], type):
        assert actual == expected
    else:
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", [name for name in CASES if name not in COUNTS])
def test_first_and_second_derivatives(name: str) -> None:
    """Numerical derivatives agree; where torch has no second one, the refusal is the same."""
    call, leaf = CASES[name], make_input(name)
    first = both(lambda: torch.autograd.gradcheck(call, leaf, fast_mode=True))
    second = both(lambda: torch.autograd.gradgradcheck(call, leaf, fast_mode=True))
    assert first == ((True,), (True,)) or name == "scatter"
    assert second[0] == (True,) or "not implemented" in second[0][1]
    for expected, actual in (first, second):
        assert actual == expected


@every_case
def test_vmap(name: str) -> None:
    """Of a batch of three, or the same error."""
    batch = torch.stack([make_input(name).detach() * factor for factor in (1, -1, 0.5)])
    assert_close(*both(lambda: torch.func.vmap(find_call(name))(batch)))


@every_case
def test_autocast(name: str) -> None:
    """In bfloat16 and with autocast on: the dtype and, within its rounding, the values."""

    def attempt() -> Tensor:
        image = make_input(name).detach().float()
        with torch.autocast("cpu", torch.bfloat16):
            return find_call(name)(image @ torch.eye(image.shape[-1]))

    expected, actual = both(attempt)
    if isinstance(expected[0], type):
        assert actual == expected
    else:
        assert actual[0].dtype == expected[0].dtype
        bound = 2e-2 * max(1.0, expected[0].abs().max().item())
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=bound)


def test_compiled_graphs() -> None:
    """Traced through fake tensors, all in one graph; what comes out runs the patched kernels."""
    names = ("nll_loss2d", "ctc_loss", "embedding_bag", "put", "median", "scatter_reduce")
    names += ("max_unpool2d", "grid_sample", "index_add", "getitem")
    names += ("bicubic", "reflection2d", "adaptive_max_pool2d")

    def run_all(leaves: list[Tensor]) -> list[Tensor]:
        return [CASES[name](leaf) for name, leaf in zip(names, leaves, strict=True)]

    leaves = [make_input(name) for name in names]
    with patches_applied("CPU"):
        eager = run_all(leaves)
        compiled = torch.compile(run_all, backend="aot_eager")(leaves)
        gradients = [
            torch.autograd.grad(sum(part.sum() for part in parts), leaves)
            for parts in (eager, compiled)
        ]
    torch.compiler.reset()
    assert_close(tuple(eager), tuple(compiled))
    torch.testing.assert_close(*gradients)
