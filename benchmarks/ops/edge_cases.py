"""Edge cases of the patched ops: torch's own samples of them, of which one argument is changed.

``check_edge_cases.py`` runs them. Each change is made to each argument of each sample.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from patches.cases import GRADIENT_CASES, list_infos
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
DTYPES = (*FLOATS, torch.complex64, torch.complex128, *INTEGERS, torch.bool)
SPECIAL = "infinities, NaN, -0.0"
NUMBERS = (torch.inf, -torch.inf, torch.nan, -0.0)
PLACES = (-1, -4, 4, 100, -100)
MOST = 64  # of the samples of an op
# CUDA's kernels give a contiguous gradient where the CPU's keep the format.
CONTIGUOUS = ("pad", "flection", "cation", "unpool")
# Not compared with sums in float64, which would see different numbers or bins.
IN_OWN_DTYPE = ("histc", "logcumsumexp")
# torch's CPU kernels round positions, or each product, to half and bfloat16.
COARSE = ("grid_sample", "index_reduce prod")
# torch's CPU kernels read outside of tensors for wrong values or sizes of these.
UNCHECKED = ("ctc_loss", "embedding_bag", "grid_sample")

Tensors = Sequence[Tensor]
Function = Callable[[Tensors], object]


class EdgeCase(NamedTuple):
    """One call.

    Attributes:
        op: What is called.
        edge: What is special about it.
        call: Returns one tensor or several, or raises; changes none of its inputs.
        reference: What to compare with in place of torch's answer, if the difference is documented.
        strides: Whether the strides are compared.
        on_cpu_only: Whether torch's CUDA kernel does not take the dtype, and ours says so.
    """

    op: str
    edge: str
    call: Callable[[], object]
    reference: Callable[[], object] | None = None
    strides: bool = True
    on_cpu_only: bool = False


class Sample(NamedTuple):
    """A function of tensors, and tensors that it takes; ``update`` changes the first one."""

    op: str
    function: Function
    tensors: Tensors
    update: Function | None = None
    write: Callable[..., object] | None = None


def list_samples() -> Iterator[Sample]:
    """Yield samples of torch's list of ops, and of the gradients that tests compare."""
    for info in list_infos():
        dtype = torch.float32 if info.supports_dtype(torch.float32, "cpu") else torch.int64
        seen = set()
        for sample in islice(info.sample_inputs("cpu", dtype), MOST):
            leaves, form = tree_flatten((sample.input, sample.args, sample.kwargs))
            kind = (
                sample.input.dim(),
                bool(sample.kwargs),
                *(leaf for leaf in leaves if isinstance(leaf, str)),
            )
            if kind in seen or (info.name == "index_put" and leaves[-1] is False):
                continue  # the latter have several values for one place
            seen.add(kind)
            at = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

            def run(
                tensors: Tensors, op: Any, leaves: Any = leaves, form: Any = form, at: Any = at,
                **more: Any,
            ) -> object:  # fmt: skip
                given = dict(zip(at, tensors, strict=True))
                own = [given.get(place, leaf) for place, leaf in enumerate(leaves)]
                first, args, kwargs = tree_unflatten(own, form)
                return op(first, *args, **kwargs, **more)

            update = partial(run, op=info.inplace_variant) if info.inplace_variant else None
            write = partial(run, op=info.op) if info.supports_out else None
            name = f"{info.name} {info.variant_test_name}".strip()
            tensors = [leaves[place] for place in at]
            yield Sample(name, partial(run, op=info.op), tensors, update, write)
    row, one = torch.randn(300), torch.tensor([3])
    yield Sample(
        "index_put of one", lambda given: given[0].index_put((given[1],), given[2]),
        [row, one, row[:1]],
    )  # fmt: skip
    for scan in (torch.cumprod, torch.logcumsumexp):
        for rows in (row, row.view(1, 300, 1)):
            dim = rows.shape.index(300)
            yield Sample(scan.__name__, lambda given, s=scan, d=dim: s(given[0], d), [rows])
    for case in GRADIENT_CASES:
        image = (torch.randperm(torch.Size(case.shape).numel()) % 251.0).view(case.shape)
        yield Sample(case.label, lambda given, own=case: own.forward(given[0]), [image])


def list_changed(tensor: Tensor, *, checked: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield changed tensors, and what is changed: the layout, the values or the shape."""
    wide = torch.stack([tensor, tensor], -1)
    yield "strided", wide[..., 0]
    if tensor.dim():
        yield "strided", tensor.transpose(0, -1).contiguous().transpose(0, -1)
        if checked:
            yield "expanded", tensor[:1].expand_as(tensor)
    if tensor.dim() > 3:
        form = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
        yield "channels last", tensor.contiguous(memory_format=form)
    if not checked:
        return
    if tensor.is_floating_point():
        for number in NUMBERS if tensor.numel() else ():
            filled = tensor.clone(memory_format=torch.contiguous_format)
            filled.view(-1)[tensor.numel() // 2] = number
            yield SPECIAL, filled
            yield SPECIAL, torch.full_like(tensor, number)
    else:
        for place in PLACES:
            yield "negative and out of range", torch.full_like(tensor, place)
        yield "longer", torch.cat([tensor, tensor]) if tensor.dim() else tensor.expand(2)
    yield "other dtype", tensor.double()
    yield "other shape", tensor[None]
    yield "0-d", tensor.flatten()[:1].sum().to(tensor.dtype)
    if tensor.dim():
        yield "empty", tensor[:0]
        yield "empty", tensor[..., :0]
        yield "other shape", tensor[..., :-1]
        yield "other shape", tensor[:1].squeeze(0)


def list_changes(sample: Sample) -> Iterator[tuple[str, Tensors]]:
    """Yield the tensors of a sample, of which one is changed, or all in the same way."""
    tensors, checked = sample.tensors, not any(word in sample.op for word in UNCHECKED)
    yield "as it is", tensors
    for place, tensor in enumerate(tensors):
        for edge, changed in list_changed(tensor, checked=checked):
            yield edge, [*tensors[:place], changed, *tensors[place + 1 :]]
    for dtype in DTYPES:
        yield f"dtype {dtype}", [t.to(dtype) if t.is_floating_point() else t for t in tensors]
    yield "int32 index", [t if t.is_floating_point() else t.int() for t in tensors]
    if checked and tensors[0].dim():
        yield "empty", [tensor[:0] if tensor.dim() else tensor for tensor in tensors]


def differentiate(
    function: Function, tensors: Tensors, change: Callable[[Tensor], Tensor] = torch.clone
) -> tuple[Tensor, ...]:
    """Return the outputs, and the gradients for gradients made of the outputs."""
    torch.default_generator.manual_seed(0)  # fractional pooling draws
    leaves = [one.detach().requires_grad_(one.dtype.is_floating_point) for one in tensors]
    outputs = [one for one in tree_leaves(function(leaves)) if isinstance(one, Tensor)]
    smooth = [one for one in outputs if one.requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    given = [change(one.detach()) for one in smooth]
    found = torch.autograd.grad(smooth, wanted, given, allow_unused=True) if smooth else ()
    return (*(one.detach() for one in outputs), *(one for one in found if one is not None))


def fill_one(number: float, output: Tensor) -> Tensor:
    """Return a gradient with one special number."""
    filled = output.clone(memory_format=torch.contiguous_format)
    filled.view(-1)[output.numel() // 2 :][:1] = number
    return filled


GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "strided gradient": lambda output: torch.stack([output, output], -1)[..., 0],
    "expanded gradient": lambda output: torch.ones((), dtype=output.dtype).expand(output.shape),
    "gradient of another shape": lambda output: output[..., :-1] if output.dim() else output[None],
}


def update_copy(update: Function, tensors: Tensors) -> object:
    """Update a copy of the first tensor, of the same strides."""
    target, *rest = tensors
    copy = target.new_empty(0)
    memory = target.untyped_storage().clone()
    return update(
        [copy.set_(memory, target.storage_offset(), target.shape, target.stride()), *rest]
    )


def update_shared(update: Function, tensors: Tensors, place: int) -> object:
    """Update a tensor that shares its memory with another argument."""
    target, other = tensors[0].clone(), tensors[place]
    memory = torch.zeros(target.numel() + other.numel(), dtype=target.dtype)
    own, shared = memory[: target.numel()].view_as(target), memory[1 : 1 + other.numel()]
    own.copy_(target)
    update([own, *tensors[1:place], shared.view_as(other), *tensors[place + 1 :]])
    return memory


OUTPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "out= empty": lambda result: result.new_empty(0),
    "out= of another shape": lambda result: result.new_empty(2, 2),
    "out= of another dtype": lambda result: result.new_empty(0, dtype=torch.int32),
    "out= strided": lambda result: torch.stack([result, result], -1)[..., 0],
}


def write_output(sample: Sample, change: Callable[[Tensor], Tensor]) -> object:
    """Write into a tensor made of the result."""
    out = change(sample.function(sample.tensors))
    return sample.write(sample.tensors, out=out)


def write_shared(sample: Sample) -> object:
    """Write into one of the arguments."""
    tensors = [tensor.clone() for tensor in sample.tensors]
    return sample.write(tensors, out=tensors[-1])


def list_variants(sample: Sample) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield updates of the first argument, and calls with ``out=``."""
    first, *rest = sample.tensors
    if sample.update is not None:
        targets = {"in place": first, "strided target": torch.stack([first, first], -1)[..., 0]}
        if first.dim():
            targets["overlapping target"] = first[:1].expand_as(first)
        for edge, target in targets.items():
            yield edge, partial(update_copy, sample.update, [target, *rest])
        for place, other in enumerate(rest, 1):
            if other.dtype == first.dtype:
                yield "shared memory", partial(update_shared, sample.update, sample.tensors, place)
    if sample.write is not None:
        for edge, change in OUTPUTS.items():
            yield edge, partial(write_output, sample, change)
        if rest:
            yield "out= shared memory", partial(write_shared, sample)


def has_strides(op: str, tensors: Tensors) -> bool:
    """Return whether the strides of results are those of CUDA's kernels."""
    changed = any(one.dim() > 3 and not one.is_contiguous() for one in tensors)
    return not (changed and any(word in op for word in CONTIGUOUS))


def read_values(function: Function, tensors: Tensors) -> Tensor:
    """Return the first result only."""
    return tree_leaves(function(tensors))[0]


def list_sample_cases(sample: Sample) -> Iterator[EdgeCase]:
    """Yield the cases of a sample."""
    for edge, tensors in list_changes(sample):
        if "median" in sample.op and edge == "expanded":
            continue  # torch's CPU kernel returns a number that is not in the row
        if tensors[0].dtype in FLOATS[:2] and any(word in sample.op for word in COARSE):
            continue
        call, reference = partial(differentiate, sample.function, tensors), None
        if "median" in sample.op and edge == SPECIAL:
            call = partial(read_values, sample.function, tensors)  # the index is any of equal ones
        dtype = tensors[0].dtype
        if dtype in FLOATS[:2] and not any(word in sample.op for word in IN_OWN_DTYPE):
            wide = [one.double() if one.is_floating_point() else one for one in tensors]
            reference = partial(differentiate, sample.function, wide)
        on_cpu_only = sample.op.startswith("index_reduce") and (
            dtype.is_complex or dtype == torch.bool
        )
        strides = has_strides(sample.op, tensors)
        yield EdgeCase(sample.op, edge, call, reference, strides, on_cpu_only)
    changes = [*GRADIENTS.items()]
    if not any(word in sample.op for word in UNCHECKED):
        changes += ((SPECIAL, partial(fill_one, number)) for number in NUMBERS)
    strides = has_strides(sample.op, sample.tensors)
    for edge, change in changes:
        call = partial(differentiate, sample.function, sample.tensors, change)
        yield EdgeCase(sample.op, edge, call, strides=strides)
    for edge, call in list_variants(sample):
        yield EdgeCase(sample.op, edge, call)


@cache
def list_cases() -> list[EdgeCase]:
    """Return all cases; the same ones in every process."""
    torch.manual_seed(0)
    return [case for sample in list_samples() for case in list_sample_cases(sample)]
