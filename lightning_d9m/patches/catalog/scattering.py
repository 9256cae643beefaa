"""Catalog entries of losses, indexing, counting, scans and order statistics."""

from lightning_d9m.patches.catalog.op import (
    ATOMICS,
    EXACT,
    ROUNDED_ONCE,
    FlagEffect,
    Op,
    map_overloads,
)

_CTC_LOSS = "lightning_d9m.patches.kernels.ctc_loss"
_EMBEDDING_BAG = "lightning_d9m.patches.kernels.fresh_sums"
_HISTC_BINCOUNT = "lightning_d9m.patches.kernels.fresh_sums"
_INDEX_ADD = "lightning_d9m.patches.kernels.updates"
_INDEX_REDUCE = "lightning_d9m.patches.kernels.updates"
_NLL_LOSS = "lightning_d9m.patches.kernels.reductions"
_ORDER_STATISTICS = "lightning_d9m.patches.kernels.reductions"
_PUT_UNPOOL = "lightning_d9m.patches.kernels.updates"
_SCAN = "lightning_d9m.patches.kernels.reductions"
_SCATTER = "lightning_d9m.patches.kernels.updates"

SCATTERING: tuple[Op, ...] = (
    Op(
        name="nll_loss2d",
        status="patched",
        flag_effect=FlagEffect.RAISES,
        documented=("torch.nn.NLLLoss",),
        torch_does="Raises for an input with two spatial dimensions, unless reduction is 'none'.",
        cause="The blocks add their partial sums with atomics, in no fixed order.",
        instead="The terms are stored and summed by torch's reduction, whose tree is fixed.",
        bits="Within a few rounding errors; half and bfloat16 are added in float32.",
        kernels=map_overloads(
            f"{_NLL_LOSS}:nll_loss2d_forward", "nll_loss2d_forward", "nll_loss2d_forward.output"
        ),
    ),
    Op(
        name="ctc_loss_backward",
        status="patched",
        flag_effect=FlagEffect.RAISES,
        documented=("torch.nn.CTCLoss",),
        torch_does="Raises in the backward pass of the native version.",
        cause="The states of one label add their posteriors with atomics.",
        instead=(
            "The backward variables come from torch's forward kernel, run on the reversed problem; "
            "the posteriors of the states of one label are added exactly, in any order."
        ),
        bits="Within the rounding errors of the log-domain sums, which grow with the length.",
        kernels=map_overloads(
            f"{_CTC_LOSS}:ctc_loss_backward", "_ctc_loss_backward", "_ctc_loss_backward.Tensor"
        ),
    ),
    Op(
        name="embedding_bag_max_backward",
        status="patched",
        flag_effect=FlagEffect.RAISES,
        documented=("torch.nn.EmbeddingBag",),
        torch_does="Raises in the backward pass of mode 'max'.",
        cause=ATOMICS,
        instead=EXACT,
        bits=ROUNDED_ONCE,
        kernels=map_overloads(
            f"{_EMBEDDING_BAG}:embedding_bag_dense_backward", "_embedding_bag_dense_backward"
        ),
    ),
    Op(
        name="put_",
        status="patched",
        flag_effect=FlagEffect.RAISES,
        documented=("torch.Tensor.put_",),
        torch_does="Raises; on a CPU only without accumulate.",
        cause="Several threads write to one place in no fixed order, and the last value stays.",
        instead=(
            "A stable sort finds the last position of each place, whose value is written; with "
            "accumulate, sums are exact."
        ),
        bits=("Equal to torch's CPU kernel on one thread; with accumulate, sums are rounded once."),
        kernels=map_overloads(f"{_PUT_UNPOOL}:put", "put_"),
    ),
    Op(
        name="histc",
        status="patched",
        flag_effect=FlagEffect.RAISES,
        documented=("torch.histc",),
        torch_does="Raises for floating point.",
        cause="Bins are counted in floating point with atomics, inexactly beyond 2**24 in float32.",
        instead="The bins are sorted and counted as integers.",
        bits="Equal to torch's CPU kernel below 2**24 elements in a bin.",
        kernels=map_overloads(f"{_HISTC_BINCOUNT}:histc", "histc", "histc.out"),
    ),
    Op(
        name="bincount",
        status="patched",
        flag_effect=FlagEffect.RAISES,
        documented=("torch.bincount",),
        torch_does="Raises if weights are given.",
        cause=ATOMICS,
        instead=EXACT,
        bits=ROUNDED_ONCE,
        kernels=map_overloads(f"{_HISTC_BINCOUNT}:bincount", "bincount"),
    ),
    *(
        Op(
            name=name,
            status="patched",
            flag_effect=FlagEffect.RAISES,
            documented=("torch.median",) if name == "median" else (),
            torch_does="Raises for the median along a dimension.",
            cause="The index is that of one of several equal elements; the threads decide which.",
            instead="The value is selected first; the index is that of the first equal element.",
            bits="The value is torch's; the index may differ where elements are equal.",
            kernels=map_overloads(f"{_ORDER_STATISTICS}:{name}_dim", f"{name}.dim_values"),
        )
        for name in ("median", "nanmedian")
    ),
    *(
        Op(
            name=name,
            status="patched",
            flag_effect=FlagEffect.NONE,
            torch_does="Runs the same kernel.",
            cause=(
                "A tensor of one row is scanned by CUB: each block adds what the blocks before it "
                "have finished, which depends on timing."
            ),
            instead="The row is scanned as the first of two, which one block does in order.",
            bits="Equal to those of the row in a tensor of several rows.",
            kernels=map_overloads(f"{_SCAN}:{name}", *overloads),
        )
        for name, overloads in (
            ("cumprod", ("cumprod", "cumprod_", "cumprod.out")),
            ("logcumsumexp", ("_logcumsumexp", "_logcumsumexp.out")),
        )
    ),
    Op(
        name="scatter_reduce_prod",
        status="patched",
        flag_effect=FlagEffect.RAISES,
        documented=("torch.Tensor.scatter_reduce",),
        torch_does="Raises for reduce='prod'.",
        cause="The threads that meet on one place multiply in no fixed order.",
        instead="The factors are sorted by place; those of one place are multiplied in order.",
        bits=(
            "Equal to torch's CPU kernel for float32, float64 and integers (on a CPU); half and "
            "bfloat16 are multiplied in float32."
        ),
        kernels=map_overloads(
            f"{_SCATTER}:scatter_reduce",
            "scatter_reduce.two",
            "scatter_reduce.two_out",
            "scatter_reduce_.two",
        ),
    ),
    Op(
        name="scatter_with_reduce",
        status="patched",
        flag_effect=FlagEffect.RAISES,
        torch_does=(
            "Raises on CUDA for scatter with a tensor and reduce='add' or 'multiply'; its "
            "documentation does not say so."
        ),
        cause="The threads that meet on one place add or multiply in no fixed order.",
        instead=f"Factors are sorted by place and multiplied in order. {EXACT}",
        bits=f"Products: equal to torch's CPU kernel, but half in float32. Sums: {ROUNDED_ONCE}",
        kernels=map_overloads(
            f"{_SCATTER}:scatter", "scatter.reduce", "scatter.reduce_out", "scatter_.reduce"
        ),
    ),
    Op(
        name="index_reduce",
        status="patched",
        flag_effect=FlagEffect.RAISES,
        torch_does="Raises on CUDA for every reduction; the docstring mentions MPS only.",
        cause="The threads that meet on one place reduce with atomics, in no fixed order.",
        instead=(
            "Factors are sorted by place and multiplied in order. A mean is an exact sum, divided "
            "by a count; a maximum is that of integers in the numbers' order, by integer atomics."
        ),
        bits=(
            "Products: equal to torch's CPU kernel, but half and bfloat16 in float32. Means: the "
            "sum is rounded once. Maxima and minima: torch's, but 0.0 is greater than -0.0."
        ),
        kernels=map_overloads(
            f"{_INDEX_REDUCE}:index_reduce", "index_reduce", "index_reduce.out", "index_reduce_"
        ),
    ),
    Op(
        name="index_add",
        status="offered",
        flag_effect=FlagEffect.SWITCHES,
        torch_does="Sorts by index and adds duplicates one by one: reported 7 times slower.",
        cause=ATOMICS,
        instead=EXACT,
        bits=ROUNDED_ONCE,
        kernels=map_overloads(
            f"{_INDEX_ADD}:index_add", "index_add", "index_add.out", "index_add_"
        ),
    ),
    Op(
        name="scatter_add",
        status="offered",
        flag_effect=FlagEffect.SWITCHES,
        documented=("torch.Tensor.scatter_add_",),
        torch_does="Sorts by the index of the flat tensor and adds duplicates one by one.",
        cause="The threads that meet on one place add with atomics, in no fixed order.",
        instead=EXACT,
        bits=ROUNDED_ONCE,
        kernels=map_overloads(
            f"{_SCATTER}:scatter_add", "scatter_add", "scatter_add.out", "scatter_add_"
        ),
    ),
    Op(
        name="index_put_accumulate",
        status="offered",
        flag_effect=FlagEffect.SWITCHES,
        documented=("torch.Tensor.index_put",),
        torch_does="Sorts by index and adds duplicates one by one.",
        cause="The threads that meet on one place add with atomics, on a CPU too.",
        instead=EXACT,
        bits=ROUNDED_ONCE,
        kernels=map_overloads(f"{_INDEX_ADD}:index_put", "_index_put_impl_"),
    ),
    Op(
        name="embedding_dense_backward",
        status="offered",
        flag_effect=FlagEffect.SWITCHES,
        torch_does="Sorts by index and adds duplicates in parts whose number is fixed.",
        cause="None known; the replacement is offered for its speed.",
        instead=EXACT,
        bits=ROUNDED_ONCE,
        kernels=map_overloads(
            f"{_EMBEDDING_BAG}:embedding_dense_backward", "embedding_dense_backward"
        ),
    ),
)
