"""Random shapes, layouts and dtypes of the patched ops, against torch in float64.

    PYTHONPATH=.:tests python benchmarks/patch_fuzz.py -o benchmarks/results/patch-fuzz.json

Each case runs on the CPU with torch's own kernel in float64, with torch's kernel in the dtype of
the case, and with the replacement. The replacement's greatest error is compared with torch's: it
may exceed it by roundings of the result. Sums by index also run with their terms shuffled, which
must not change a bit.
"""

import argparse
import json
import random
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor

from lightning_d9m.patches.registration import patches_applied

ROUNDINGS = 8  # of the greatest magnitude: the replacement's error beyond torch's
Compute = Callable[[torch.dtype], Tensor]


class Case(NamedTuple):
    """One call.

    Attributes:
        op: What is called.
        compute: Returns the result, computed in a dtype.
        shuffle: Returns it with the terms in another order, if there is an order.
    """

    op: str
    compute: Compute
    shuffle: Compute | None = None


def lay_out(values: Tensor, draw: random.Random) -> Tensor:
    """Return equal values in another memory layout."""
    kind = draw.choice(["plain", "permuted", "sliced", "channels_last", "offset"])
    if kind == "permuted" and values.dim() > 1:
        axes = list(range(values.dim()))
        draw.shuffle(axes)
        back = [axes.index(axis) for axis in range(len(axes))]
        return values.permute(axes).contiguous().permute(back)
    if kind == "sliced" and values.dim():
        return torch.cat([values, values], -1)[..., : values.shape[-1]]
    if kind == "channels_last" and values.dim() in (4, 5):
        form = torch.channels_last if values.dim() == 4 else torch.channels_last_3d
        return values.contiguous(memory_format=form)
    if kind == "offset":
        return torch.cat([values.flatten()[:1], values.flatten()])[1:].view(values.shape)
    return values


def draw_values(draw: random.Random, *shape: int) -> Tensor:
    """Return float32 numbers over a few orders of magnitude, or expanded ones."""
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    values = torch.randn(shape, generator=generator)
    spread = draw.choice([0, 0, 8])
    return values * (torch.rand(shape, generator=generator) * spread).exp2()


def draw_resampling(draw: random.Random) -> Case:
    """Return the gradient of an op that is linear: interpolation, average pooling or padding."""
    dims = draw.randint(1, 3)
    shape = [draw.randint(1, 3), draw.randint(1, 4), *[draw.randint(1, 12) for _ in range(dims)]]
    sizes = [draw.randint(1, 20) for _ in range(dims)]
    corners = draw.random() < 0.5
    kinds = ["linear", "reflect", "replicate", "average", "adaptive"]
    kind = draw.choice([*kinds, "cubic", "aa", "cubic aa"] if dims == 2 else kinds)
    if kind == "adaptive" and dims == 1:
        dims, shape, sizes = 2, [*shape, 5], [*sizes, 3]
    sides = [draw.randint(0, size - 1) for size in shape[:1:-1] for _ in range(2)]
    mode = {1: "linear", 2: "bilinear", 3: "trilinear"}[dims]
    window = [draw.randint(1, 4) for _ in range(3)]
    forwards: dict[str, Callable[[Tensor], Tensor]] = {
        "linear": lambda x: nnf.interpolate(x, sizes, mode=mode, align_corners=corners),
        "cubic": lambda x: nnf.interpolate(x, sizes, mode="bicubic", align_corners=corners),
        "aa": lambda x: nnf.interpolate(x, sizes, mode="bilinear", antialias=True),
        "cubic aa": lambda x: nnf.interpolate(x, sizes, mode="bicubic", antialias=True),
        "reflect": lambda x: nnf.pad(x, sides, mode="reflect"),
        "replicate": lambda x: nnf.pad(x, sides, mode="replicate"),
        "average": lambda x: nnf.avg_pool3d(
            x, window, draw_stride, [side // 2 for side in window], corners, not corners
        ),
        "adaptive": lambda x: (nnf.adaptive_avg_pool2d, nnf.adaptive_avg_pool3d)[dims - 2](
            x, sizes
        ),
    }
    draw_stride = [draw.randint(1, 4) for _ in range(3)]
    if kind == "average":
        shape = [*shape[:2], *[draw.randint(4, 9) for _ in range(3)]]
    forward = forwards[kind]
    return _differentiate(kind, forward, draw_values(draw, *shape), draw)


def draw_max_pool(draw: random.Random) -> Case:
    """Return the gradient of a max pooling."""
    dims = draw.randint(2, 3)
    shape = [draw.randint(1, 3), draw.randint(1, 4), *[draw.randint(4, 10) for _ in range(dims)]]
    sizes = [draw.randint(1, 12) for _ in range(dims)]
    window, stride = draw.randint(1, 4), draw.randint(1, 3)
    adaptive = (nnf.adaptive_max_pool2d, nnf.adaptive_max_pool3d)[dims - 2]
    forward: Callable[[Tensor], Tensor] = lambda x: adaptive(x, sizes)  # noqa: E731 - one of two
    if dims == 3 and draw.random() < 0.6:
        forward = lambda x: nnf.max_pool3d(x, window, stride, window // 2)  # noqa: E731 - as above
    count = torch.Size(shape).numel()
    image = torch.randperm(count, generator=torch.Generator().manual_seed(count)).view(shape)
    return _differentiate("max pool", forward, image.float(), draw)


def _differentiate(
    op: str, forward: Callable[[Tensor], Tensor], image: Tensor, draw: random.Random
) -> Case:
    gradient = lay_out(draw_values(draw, *forward(image).shape), draw)
    if draw.random() < 0.1:
        gradient = gradient.flatten()[:1].view([1] * gradient.dim()).expand(gradient.shape)
    image = lay_out(image, draw)

    def compute(dtype: torch.dtype) -> Tensor:
        leaf = image.to(dtype).requires_grad_()
        return torch.autograd.grad(forward(leaf), leaf, gradient.to(dtype))[0]

    return Case(op, compute)


def draw_sampling(draw: random.Random) -> Case:
    """Return the gradient of ``grid_sample`` by the image."""
    dims = draw.randint(2, 3)
    shape = [draw.randint(1, 3), draw.randint(1, 4), *[draw.randint(1, 8) for _ in range(dims)]]
    outputs = [draw.randint(1, 9) for _ in range(dims)]
    modes = ["bilinear", "nearest", "bicubic"][: 5 - dims]
    more = draw.choice(modes), draw.choice(["zeros", "border", "reflection"]), draw.random() < 0.5
    image = lay_out(draw_values(draw, *shape), draw)
    # Positions that float32 holds as exactly as float64.
    grid = (draw_values(draw, shape[0], *outputs, dims).clamp(-2, 2) * 64).round() / 64
    gradient = lay_out(draw_values(draw, shape[0], shape[1], *outputs), draw)

    def compute(dtype: torch.dtype) -> Tensor:
        leaf = image.to(dtype).requires_grad_()
        sampled = nnf.grid_sample(leaf, grid.to(dtype), *more)
        return torch.autograd.grad(sampled, leaf, gradient.to(dtype))[0]

    return Case("grid_sample", compute)


def draw_update(draw: random.Random) -> Case:
    """Return values added to a tensor by an index, into places that get few or many."""
    shape = [draw.randint(1, 6) for _ in range(draw.randint(1, 3))]
    dim = draw.randrange(len(shape))
    count, terms = draw.choice([1, 3, 40, 400]), draw.choice([1, 7, 60, 300])
    target = lay_out(draw_values(draw, *shape[:dim], count, *shape[dim + 1 :]), draw)
    source = lay_out(draw_values(draw, *shape[:dim], terms, *shape[dim + 1 :]), draw)
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    index = lay_out(torch.randint(count, (terms,), generator=generator), draw)
    order = torch.randperm(terms, generator=generator)
    layout = draw.randrange(2**31)  # of the index where it has the shape of the values
    reductions = [
        f"scatter_reduce {kind}{mark}"
        for kind in ("sum", "mean", "amax")
        for mark in ("", " without self")
    ]
    ops = ["index_add", "scatter_add", "mean", "index_put", "amax", "put"]
    op = draw.choice([*ops, draw.choice(reductions)])

    def update(dtype: torch.dtype, index: Tensor, source: Tensor) -> Tensor:
        given, values = target.to(dtype), source.to(dtype)
        wide = index.reshape([-1 if side == dim else 1 for side in range(len(shape))])
        wide = lay_out(wide.expand(values.shape), random.Random(layout))  # noqa: S311 - no secret
        if op == "index_add":
            return given.index_add(dim, index, values)
        if op == "scatter_add":
            return given.clone().scatter_add_(dim, wide, values)
        if op in reductions:
            more = op.split()[1], "without" not in op
            return given.clone().scatter_reduce_(dim, wide, values, more[0], include_self=more[1])
        if op == "index_put":
            moved = given.movedim(dim, 0)
            return moved.index_put((index,), values.movedim(dim, 0), accumulate=True)
        if op == "put":
            places = index % given.numel()
            return given.put(places, values.movedim(dim, -1).reshape(-1, terms)[0], accumulate=True)
        return given.clone().index_reduce_(dim, index, values, op)

    return Case(
        op,
        lambda dtype: update(dtype, index, source),
        lambda dtype: update(dtype, index[order], source.index_select(dim, order)),
    )


def draw_lookup(draw: random.Random) -> Case:
    """Return the gradient of a lookup, or a histogram with weights."""
    rows, terms, features = draw.randint(1, 30), draw.randint(1, 200), draw.randint(1, 5)
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    index = lay_out(torch.randint(rows, (terms,), generator=generator), draw)
    order = torch.randperm(terms, generator=generator)
    gradient = lay_out(draw_values(draw, terms, features), draw)
    op = draw.choice(["embedding_bag", "bincount"])

    def look_up(dtype: torch.dtype, index: Tensor, gradient: Tensor) -> Tensor:
        if op == "bincount":
            return torch.bincount(index, gradient[:, 0].to(dtype), minlength=rows)
        table = torch.zeros(rows, features, dtype=dtype, requires_grad=True)
        greatest = nnf.embedding_bag(index[:, None], table, mode="max")  # of bags of one row
        return torch.autograd.grad(greatest, table, gradient.to(dtype))[0]

    return Case(
        op,
        lambda dtype: look_up(dtype, index, gradient),
        lambda dtype: look_up(dtype, index[order], gradient[order]),
    )


DRAWS = (draw_resampling, draw_max_pool, draw_sampling, draw_update, draw_lookup)


def find_difference(case: Case, dtype: torch.dtype) -> str | None:
    """Return how the replacement is worse than torch, or depends on the order of terms."""
    reference, own = case.compute(torch.float64), case.compute(dtype)
    with patches_applied("CPU"):
        actual = case.compute(dtype)
        shuffled = actual if case.shuffle is None else case.shuffle(dtype)
    if not torch.equal(actual, shuffled):
        return "the bits depend on the order of the terms"
    if actual.shape != own.shape or actual.dtype != own.dtype:
        return f"{actual.dtype} of {tuple(actual.shape)} for {own.dtype} of {tuple(own.shape)}"
    if not actual.numel():
        return None
    mine, theirs = (float((part.double() - reference).abs().max()) for part in (actual, own))
    unit = torch.finfo(dtype).eps * float(reference.abs().max())
    if mine > theirs + ROUNDINGS * unit:
        return f"error {mine:.3g}, of torch {theirs:.3g}, unit {unit:.3g}"
    return None


def run_cases(seeds: range) -> tuple[Counter[str], list[dict[str, object]]]:
    """Return the number of cases of each op, and the differences."""
    counts: Counter[str] = Counter()
    differences: list[dict[str, object]] = []
    for seed in seeds:
        draw = random.Random(seed)  # noqa: S311 - no secret
        case = DRAWS[seed % len(DRAWS)](draw)
        dtype = draw.choice([torch.float32, torch.float32, torch.float64])
        counts[case.op] += 1
        difference = find_difference(case, dtype)
        if difference:
            differences.append({"seed": seed, "op": case.op, "difference": difference})
    return counts, differences


def main() -> None:
    """Write the number of cases of each op, and every difference."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--cases", type=int, default=2000)
    words = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    counts, differences = run_cases(range(words.cases))
    record = {
        "torch": torch.__version__,
        "cases": words.cases,
        "cases_by_op": dict(sorted(counts.items())),
        "differences": differences,
    }
    text = json.dumps(record, indent=1)
    print(text)
    if words.output:
        words.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
