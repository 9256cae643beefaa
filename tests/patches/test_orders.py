"""Sums in 1,000 orders of their terms: one result, for every op whose terms can be given in any."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_d9m.patches.catalog.catalog import OPS
from lightning_d9m.patches.registration import patches_applied

ORDERS, TERMS, PLACES = 1000, 60, 5
DRAWS = torch.Generator().manual_seed(7)
INDEX = torch.randint(PLACES, (TERMS,), generator=DRAWS)
VALUES = (
    torch.randn(TERMS, 2, generator=DRAWS)
    * torch.randint(-9, 9, (TERMS, 2), generator=DRAWS).float().exp2()
)
TARGET = torch.randn(PLACES, 2, generator=DRAWS)
GRID = torch.rand(1, TERMS, 2, generator=DRAWS) * 2 - 1
aten = torch.ops.aten


def look_up_bags(order: Tensor) -> Tensor:
    """Return the gradient of a table whose rows were the greatest of each bag."""
    none = torch.zeros(TERMS, dtype=torch.int64)
    chosen = INDEX[order, None].expand(-1, 2)
    return aten._embedding_bag_dense_backward(
        VALUES[order], none, none, none + 1, chosen, PLACES, False, 2, None
    )


def sample(dims: int) -> Callable[[Tensor], Tensor]:
    """Return the gradient of an image by samples in some order."""
    sizes, one = (3, 2, 2)[:dims], [1] * (dims - 1)
    image = torch.randn(1, 2, *sizes, generator=DRAWS)
    grid = torch.cat([GRID, GRID[..., :1]], 2)[..., :dims]
    backward = getattr(aten, f"grid_sampler_{dims}d_backward")

    def compute(order: Tensor) -> Tensor:
        gradient = VALUES[order].t().reshape(1, 2, *one, TERMS)
        places = grid[:, order].reshape(1, *one, TERMS, dims)
        return backward(gradient, image, places, 0, 0, False, [True, False])[0]

    return compute


def pool(name: str, dims: int, *more: object) -> Callable[[Tensor], Tensor]:
    """Return the gradient of a pooling whose windows chose few inputs."""
    sides = (3, 4, 5)[:dims] if dims == 3 else (12, 5)
    image = torch.randn(2, *sides, generator=DRAWS)

    def compute(order: Tensor) -> Tensor:
        gradient = VALUES[order].t().reshape(2, *sides)
        chosen = INDEX[order].expand(2, -1).reshape(2, *sides)
        return getattr(aten, name)(gradient, image, *more, chosen)

    return compute


def reduce(name: str) -> Callable[[Tensor], Tensor]:
    """Return what is reduced by an index."""
    return lambda order: TARGET.index_reduce(0, INDEX[order], VALUES[order], name)


def scatter(call: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return what is scattered by an index of the values' shape."""
    return lambda order: call(INDEX[order, None].expand(-1, 2), VALUES[order])


WINDOWS = ([3] * 3, [1] * 3, [1] * 3, [1] * 3, False)  # 27, for at most as many terms
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "index_add": lambda order: TARGET.index_add(0, INDEX[order], VALUES[order]),
    "index_put_accumulate": lambda order: TARGET.index_put(
        (INDEX[order],), VALUES[order], accumulate=True
    ),
    "put_": lambda order: TARGET.put(INDEX[order], VALUES[order, 0], accumulate=True),
    "scatter_add": scatter(lambda index, values: TARGET.scatter_add(0, index, values)),
    "scatter_with_reduce": scatter(
        lambda index, values: TARGET.scatter(0, index, values, reduce="add")
    ),
    **{f"index_reduce-{name}": reduce(name) for name in ("mean", "amax", "amin")},
    "bincount": lambda order: torch.bincount(INDEX[order], VALUES[order, 0]),
    "histc": lambda order: torch.histc(VALUES[order], 7),
    "embedding_bag_max_backward": look_up_bags,
    "grid_sampler_2d_backward": sample(2),
    "grid_sampler_3d_backward": sample(3),
    "adaptive_max_pool2d_backward": pool("adaptive_max_pool2d_backward", 2),
    "adaptive_max_pool3d_backward": pool("adaptive_max_pool3d_backward", 3),
    "fractional_max_pool2d_backward": pool("fractional_max_pool2d_backward", 2, [5, 5], [12, 5]),
    "fractional_max_pool3d_backward": pool(
        "fractional_max_pool3d_backward", 3, [3, 3, 3], [3, 4, 5]
    ),
    "max_pool3d_backward": pool("max_pool3d_with_indices_backward", 3, *WINDOWS),
}
FIXED = {
    *("nll_loss2d", "ctc_loss_backward"),  # torch's reduction of terms that are stored by position
    *(
        "median",
        "nanmedian",
        "scatter_reduce_prod",
        "cumprod",
        "logcumsumexp",
    ),  # from first to last
    *("max_unpool2d", "max_unpool3d"),  # the last one is written
}
"""Ops whose result depends on the positions of the elements; no other order is given to them."""


@pytest.mark.filterwarnings("ignore:index_reduce.* is in beta")
@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_thousand_orders_have_one_result(call: Callable[[Tensor], Tensor]) -> None:
    """Bit for bit, of terms over 18 binary orders of magnitude."""
    with patches_applied("CPU"):
        results = {
            call(torch.randperm(TERMS, generator=DRAWS)).numpy().tobytes() for _ in range(ORDERS)
        }
    assert len(results) == 1


def test_torch_gives_several() -> None:
    """The negative control."""
    add = CALLS["index_add"]
    orders = [torch.randperm(TERMS, generator=DRAWS) for _ in range(50)]
    assert len({add(order).numpy().tobytes() for order in orders}) > 1


def test_every_op_is_here() -> None:
    """But those whose inputs read outputs in ascending order, or that follow positions."""
    shuffled = {name.partition("-")[0] for name in CALLS} | FIXED
    separable = {
        op.name for op in OPS if any(".separable:" in path for path in op.kernels.values())
    }
    assert {op.name for op in OPS if op.kernels} == shuffled | separable
