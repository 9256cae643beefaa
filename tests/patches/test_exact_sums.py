"""Sums in 1,000 orders of their terms: one result, for every op whose terms can be given in any.

One call computes all orders, each with places of its own.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_d9m.ops.patches.catalog.catalog import OPS
from lightning_d9m.ops.patches.registration import patches_applied

ORDERS, TERMS, PLACES = 1000, 60, 5
DRAWS = torch.Generator().manual_seed(7)
INDEX = torch.randint(PLACES, (TERMS,), generator=DRAWS)
VALUES = torch.randn(TERMS, 2, generator=DRAWS)
VALUES *= torch.randint(-9, 9, (TERMS, 2), generator=DRAWS).float().exp2()
TARGETS = torch.randn(PLACES, 2, generator=DRAWS).repeat(ORDERS, 1)
GRID = torch.rand(TERMS, 3, generator=DRAWS) * 2 - 1
ORDER = torch.rand(ORDERS, TERMS, generator=DRAWS).argsort(1)
aten = torch.ops.aten
Call = Callable[[Tensor, Tensor], Tensor]
"""Takes the places of all terms, of all orders, and their values."""


def look_up_bags(index: Tensor, values: Tensor) -> Tensor:
    """Return the gradient of a table whose rows were the greatest of each bag."""
    none, chosen = torch.zeros_like(index), index[:, None].expand(-1, 2)
    more = (none, none, none + 1, chosen, PLACES * ORDERS, False, 2, None)
    return aten._embedding_bag_dense_backward(values, *more)


def spread(values: Tensor, *sides: int) -> Tensor:
    """Return values as a gradient of two channels, of which each order is a sample."""
    return values.view(ORDERS, TERMS, 2).mT.reshape(ORDERS, 2, *sides)


def sample(*sizes: int) -> Call:
    """Return the gradient of images by samples in some order."""
    dims, sides = len(sizes), [*[1] * (len(sizes) - 1), TERMS]
    backward, image = (
        getattr(aten, f"grid_sampler_{dims}d_backward"),
        torch.zeros(ORDERS, 2, *sizes),
    )
    grid = GRID[ORDER, :dims].reshape(ORDERS, *sides, dims)
    mask = [True, False]
    return lambda _, values: backward(spread(values, *sides), image, grid, 0, 0, False, mask)[0]


def pool(name: str, *more: object) -> Call:
    """Return the gradient of a pooling whose windows chose few inputs."""
    sides = (3, 4, 5) if "3d" in name else (12, 5)

    def compute(index: Tensor, values: Tensor) -> Tensor:
        gradient = spread(values, *sides)
        chosen = (index % PLACES).view(ORDERS, 1, *sides).expand(gradient.shape)
        return getattr(aten, name)(gradient, torch.zeros_like(gradient), *more, chosen)

    return compute


def update(method: str, *more: object, **words: object) -> Call:
    """Return an update of rows by an index, which has the values' shape if they are scattered."""
    wide = method.startswith("scatter")
    return lambda index, values: getattr(TARGETS, method)(
        0, index[:, None].expand(-1, 2) if wide else index, values, *more, **words
    )


KINDS = ("sum", "mean", "amax", "amin")
WINDOWS = ([3] * 3, [1] * 3, [1] * 3, [1] * 3, False)  # 27, for at most as many terms
CALLS: dict[str, Call] = {
    "index_add": update("index_add"),
    "index_put_accumulate": lambda index, values: TARGETS.index_put((index,), values, True),
    "put_": lambda index, values: TARGETS[:, 0].put(index, values[:, 0], accumulate=True),
    "scatter_add": update("scatter_add"),
    "scatter_with_reduce": update("scatter", reduce="add"),
    **{
        f"scatter_reduce_prod-{kind}": update("scatter_reduce", kind, include_self=kind != "sum")
        for kind in KINDS
    },
    **{f"index_reduce-{kind}": update("index_reduce", kind) for kind in KINDS[1:]},
    "bincount": lambda index, values: torch.bincount(index, values[:, 0]),
    "histc": lambda _, values: torch.stack([one.histc(7) for one in values.view(ORDERS, -1)]),
    "embedding_bag_max_backward": look_up_bags,
    "grid_sampler_2d_backward": sample(3, 2),
    "grid_sampler_3d_backward": sample(3, 2, 2),
    "adaptive_max_pool2d_backward": pool("adaptive_max_pool2d_backward"),
    "adaptive_max_pool3d_backward": pool("adaptive_max_pool3d_backward"),
    "fractional_max_pool2d_backward": pool("fractional_max_pool2d_backward", [5, 5], [12, 5]),
    "fractional_max_pool3d_backward": pool("fractional_max_pool3d_backward", [3] * 3, [3, 4, 5]),
    "max_pool3d_backward": pool("max_pool3d_with_indices_backward", *WINDOWS),
}
# Ops whose result depends on the positions of the elements; no other order is given to them:
# torch's reductions of terms that are stored by position, from first to last, the last written.
FIXED = {"nll_loss2d", "ctc_loss_backward", "median", "nanmedian", "cumprod", "logcumsumexp"}
FIXED |= {"max_unpool2d", "max_unpool3d"}


def count_results(call: Call) -> int:
    """Return how many different bits the orders have."""
    first = torch.arange(ORDERS)[:, None] * PLACES
    results = call((INDEX[ORDER] + first).flatten(), VALUES[ORDER].flatten(0, 1))
    return len(set(map(bytes, results.reshape(ORDERS, -1).numpy())))


@pytest.mark.filterwarnings("ignore:index_reduce.* is in beta")
@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter")
def test_a_thousand_orders_have_one_result() -> None:
    """Bit for bit, of terms over 18 binary orders of magnitude; torch gives several."""
    with patches_applied("CPU"):
        assert {name: count_results(call) for name, call in CALLS.items()} == dict.fromkeys(
            CALLS, 1
        )
    assert count_results(CALLS["index_add"]) > 1
    # But those whose inputs read outputs in ascending order, or that follow positions.
    shuffled = {name.partition("-")[0] for name in CALLS} | FIXED
    separable = {
        op.name for op in OPS if any(".separable:" in path for path in op.kernels.values())
    }
    assert {op.name for op in OPS if op.kernels} == shuffled | separable
