"""Catalog entries of losses, indexing, counting, scans and order statistics."""

from typing import Any

from lightning_d9m.patches.catalog.op import (
    EXACT,
    LAST_STAYS,
    ROUNDED_ONCE,
    FlagEffect,
    Op,
    make_patched,
)

_MEET = "The threads that meet on one place {}, in no fixed order."
_OFFERED: dict[str, Any] = {"status": "offered", "flag_effect": FlagEffect.SWITCHES}
_MEDIAN: dict[str, Any] = {
    "torch_does": "Raises for the median along a dimension.",
    "cause": "The index is that of one of several equal elements; the threads decide which.",
    "instead": "The value is selected first; the index is that of the first equal element.",
    "bits": "The value is torch's; the index may differ where elements are equal.",
}
_SCAN: dict[str, Any] = {
    "flag_effect": FlagEffect.NONE,
    "torch_does": "Runs the same kernel.",
    "cause": (
        "A tensor of one row is scanned by CUB: each block adds what the blocks before it have "
        "finished, which depends on timing."
    ),
    "instead": "The row is scanned as the first of two, which one block does in order.",
    "bits": "Equal to those of the row in a tensor of several rows.",
}

SCATTERING: tuple[Op, ...] = (
    make_patched(
        "nll_loss2d",
        "reductions:nll_loss2d_forward",
        "nll_loss2d_forward nll_loss2d_forward.output",
        "torch.nn.NLLLoss",
        torch_does="Raises for an input with two spatial dimensions, unless reduction is 'none'.",
        cause="The blocks add their partial sums with atomics, in no fixed order.",
        instead="The terms are stored and summed by torch's reduction, whose tree is fixed.",
        bits="Within a few rounding errors; half and bfloat16 are added in float32.",
    ),
    make_patched(
        "ctc_loss_backward",
        "ctc_loss:ctc_loss_backward",
        "_ctc_loss_backward _ctc_loss_backward.Tensor",
        "torch.nn.CTCLoss",
        torch_does="Raises in the backward pass of the native version.",
        cause="The states of one label add their posteriors with atomics.",
        instead=(
            "The backward variables come from torch's forward kernel, run on the reversed problem; "
            "the posteriors of the states of one label are added exactly, in any order."
        ),
        bits="Within the rounding errors of the log-domain sums, which grow with the length.",
    ),
    make_patched(
        "embedding_bag_max_backward",
        "fresh_sums:embedding_bag_dense_backward",
        "_embedding_bag_dense_backward",
        "torch.nn.EmbeddingBag",
        torch_does="Raises in the backward pass of mode 'max'.",
    ),
    make_patched(
        "put_",
        "updates:put",
        "put_",
        "torch.Tensor.put_",
        torch_does="Raises; on a CPU only without accumulate.",
        cause=LAST_STAYS,
        instead=(
            "The last position of each place is found as the greatest one, and its value is "
            "written; with accumulate, sums are exact."
        ),
        bits="Equal to torch's CPU kernel on one thread; with accumulate, sums are rounded once.",
    ),
    make_patched(
        "histc",
        "fresh_sums:histc",
        "histc histc.out",
        "torch.histc",
        torch_does="Raises for floating point.",
        cause="Bins are counted in floating point with atomics, inexactly beyond 2**24 in float32.",
        instead="The bins are sorted and counted as integers.",
        bits="Equal to torch's CPU kernel below 2**24 elements in a bin.",
    ),
    make_patched(
        "bincount",
        "fresh_sums:bincount",
        "bincount",
        "torch.bincount",
        torch_does="Raises if weights are given.",
    ),
    make_patched("median", "reductions:median_dim", "median.dim_values", "torch.median", **_MEDIAN),
    make_patched("nanmedian", "reductions:nanmedian_dim", "nanmedian.dim_values", **_MEDIAN),
    make_patched("cumprod", "reductions:cumprod", "cumprod cumprod_ cumprod.out", **_SCAN),
    make_patched(
        "logcumsumexp",
        "reductions:logcumsumexp",
        "_logcumsumexp _logcumsumexp.out",
        **_SCAN,
    ),
    make_patched(
        "scatter_reduce_prod",
        "updates:scatter_reduce",
        "scatter_reduce.two scatter_reduce.two_out scatter_reduce_.two",
        "torch.Tensor.scatter_reduce",
        torch_does="Raises for reduce='prod'.",
        cause=_MEET.format("multiply"),
        instead="The factors are sorted by place; those of one place are multiplied in order.",
        bits=(
            "Equal to torch's CPU kernel for float32, float64 and integers (on a CPU); half and "
            "bfloat16 are multiplied in float32."
        ),
    ),
    make_patched(
        "scatter_with_reduce",
        "updates:scatter",
        "scatter.reduce scatter.reduce_out scatter_.reduce",
        torch_does=(
            "Raises on CUDA for scatter with a tensor and reduce='add' or 'multiply'; its "
            "documentation does not say so."
        ),
        cause=_MEET.format("add or multiply"),
        instead=f"Factors are sorted by place and multiplied in order. {EXACT}",
        bits=f"Products: equal to torch's CPU kernel, but half in float32. Sums: {ROUNDED_ONCE}",
    ),
    make_patched(
        "index_reduce",
        "updates:index_reduce",
        "index_reduce index_reduce.out index_reduce_",
        torch_does="Raises on CUDA for every reduction; the docstring mentions MPS only.",
        cause=_MEET.format("reduce with atomics"),
        instead=(
            "Factors are sorted by place and multiplied in order. A mean is an exact sum, divided "
            "by a count; a maximum is that of integers in the numbers' order, by integer atomics."
        ),
        bits=(
            "Products: equal to torch's CPU kernel, but half and bfloat16 in float32. Means: the "
            "sum is rounded once. Maxima and minima: torch's, but 0.0 is greater than -0.0."
        ),
    ),
    make_patched(
        "index_add",
        "updates:index_add",
        "index_add index_add.out index_add_",
        torch_does="Sorts by index and adds duplicates one by one: reported 7 times slower.",
        **_OFFERED,
    ),
    make_patched(
        "scatter_add",
        "updates:scatter_add",
        "scatter_add scatter_add.out scatter_add_",
        "torch.Tensor.scatter_add_",
        torch_does="Sorts by the index of the flat tensor and adds duplicates one by one.",
        cause=_MEET.format("add with atomics"),
        **_OFFERED,
    ),
    make_patched(
        "index_put_accumulate",
        "updates:index_put",
        "_index_put_impl_",
        "torch.Tensor.index_put",
        torch_does="Sorts by index and adds duplicates one by one.",
        cause="The threads that meet on one place add with atomics, on a CPU too.",
        **_OFFERED,
    ),
    make_patched(
        "embedding_dense_backward",
        "fresh_sums:embedding_dense_backward",
        "embedding_dense_backward",
        torch_does="Sorts by index and adds duplicates in parts whose number is fixed.",
        cause="None known; the replacement is offered for its speed.",
        **_OFFERED,
    ),
)
