"""Patched ops as unpatched under what torch does to functions: derivatives, vmap, graphs."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.nn.functional as nnf
from patches.cases import GRADIENT_CASES, answer, deterministic_algorithms
from torch import Tensor

from lightning_d9m.ops.patches.registration import Kernel, patches_applied

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
    **{
        f"scatter_reduce-{kind}": lambda x, kind=kind, kept=kind != "mean": FIXED.scatter_reduce(
            0, WHERE[:5], x, kind, include_self=kept
        )
        for kind in ("mean", "amax")
    },
    "scatter_reduce-source": lambda x: FIXED.scatter_reduce(0, WHERE[:5], x, "prod"),
    **{
        f"index_reduce-{kind}": lambda x, kind=kind: x.index_reduce(0, ROWS, FIXED, kind)
        for kind in ("prod", "mean", "amax")
    },
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


def both(attempt: Callable[[], object]) -> tuple[object, object]:
    expected = answer(attempt)
    with patches_applied("CPU"):
        return expected, answer(attempt)


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


@pytest.mark.parametrize(
    "name", sorted(CASES.keys() - {"embedding", "scatter"})
)  # torch's are kept
def test_what_programs_call_reaches_a_replacement(name: str) -> None:
    """The op itself, or its gradient."""
    call, leaf, run, replaced = CASES[name], make_input(name), Kernel.replace, []

    def replace(kernel, *given):
        replaced.append(run(kernel, *given) is not NotImplemented)
        return run(kernel, *given)

    with (
        mock.patch.object(Kernel, "replace", autospec=True, side_effect=replace),
        patches_applied("CPU"),
        deterministic_algorithms(),
    ):
        output = call(leaf.detach() if name in COUNTS else leaf)
        if output.requires_grad:
            output.sum().backward()
    assert any(replaced)


@pytest.mark.parametrize("transform", ["vmap", "autocast"])
@pytest.mark.parametrize("name", CASES)
def test_transforms(name: str, transform: str) -> None:
    """As close as sums in another order are, or the same error; of an op, or of its gradient.

    With vmap a batch of three; with autocast in bfloat16, the dtype and, within its rounding, the
    values.
    """
    call, leaf = CASES[name], make_input(name).detach()
    if name in SMALL:
        call = torch.func.grad(lambda x: CASES[name](x).square().sum())

    def attempt() -> Tensor:
        if transform == "vmap":
            return torch.func.vmap(call)(torch.stack([leaf, -leaf, leaf / 2]))
        with torch.autocast("cpu", torch.bfloat16):
            return call(leaf.float() @ torch.eye(leaf.shape[-1]))

    expected, actual = both(attempt)
    near = {"rtol": 1e-6, "atol": 1e-9}
    if transform == "autocast" and isinstance(expected[0], Tensor):
        near = {"rtol": 2e-2, "atol": 2e-2 * max(1.0, expected[0].abs().max().item())}
    if isinstance(expected[0], type):
        assert actual == expected  # word for word
    else:  # the dtype as well
        torch.testing.assert_close(actual, expected, equal_nan=True, **near)


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
    torch.testing.assert_close((eager, gradients[0]), (compiled, gradients[1]))
