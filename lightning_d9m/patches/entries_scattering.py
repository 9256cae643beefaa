"""The catalogue's entries for losses, indexing, counting and order statistics."""

from lightning_d9m.patches.op import ATOMICS, Op

_SORTED = "The contributions are sorted by where they go; each place adds its own, in order."

SCATTERING: tuple[Op, ...] = (
    Op(
        name="nll_loss2d",
        status="patched",
        documented=("torch.nn.NLLLoss",),
        torch_does="Raises for an input with two spatial dimensions, unless reduction is 'none'.",
        cause="The blocks add their partial sums with atomics, in no fixed order.",
        instead="The terms are written down and summed by torch's reduction, a fixed tree.",
        bits="Within a few rounding errors; half and bfloat16 are added in float32.",
        kernels={
            "nll_loss2d_forward": "losses:nll_loss2d_forward",
            "nll_loss2d_forward.output": "losses:nll_loss2d_forward",
        },
    ),
    Op(
        name="ctc_loss_backward",
        status="patched",
        documented=("torch.nn.CTCLoss",),
        torch_does="Raises in the backward pass of the native version.",
        cause="The states of one label add their posteriors with atomics.",
        instead=(
            "The backward variables come from torch's forward kernel, run on the reversed problem; "
            "the states are sorted by label, and each label adds its own."
        ),
        bits="Within the rounding errors of the log-domain sums, which grow with the length.",
        kernels={
            "_ctc_loss_backward": "alignments:ctc_loss_backward",
            "_ctc_loss_backward.Tensor": "alignments:ctc_loss_backward",
        },
    ),
    Op(
        name="embedding_bag_max_backward",
        status="patched",
        documented=("torch.nn.EmbeddingBag",),
        torch_does="Raises in the backward pass of mode 'max'.",
        cause=ATOMICS,
        instead=_SORTED,
        bits="Equal to torch's CPU kernel on one thread for float32 and float64.",
        kernels={"_embedding_bag_dense_backward": "bags:embedding_bag_dense_backward"},
    ),
    Op(
        name="put_",
        status="patched",
        documented=("torch.Tensor.put_",),
        torch_does="Raises; on a CPU only without accumulate.",
        cause="Of several values for one place, whichever thread writes last wins.",
        instead=(
            "All values for one place are made the last one before they are written; accumulate "
            "goes to index_put_, which sorts."
        ),
        bits="Equal to torch's CPU kernel on one thread.",
        kernels={"put_": "placement:put_"},
    ),
    Op(
        name="histc",
        status="patched",
        documented=("torch.histc",),
        torch_does="Raises for floating point.",
        cause="Bins are counted in floating point with atomics, inexactly beyond 2**24 in float32.",
        instead="The bins are sorted and counted as integers.",
        bits="Equal to torch's CPU kernel below 2**24 elements in a bin.",
        kernels={"histc": "histograms:histc", "histc.out": "histograms:histc"},
    ),
    Op(
        name="bincount",
        status="patched",
        documented=("torch.bincount",),
        torch_does="Raises if weights are given.",
        cause=ATOMICS,
        instead=_SORTED,
        bits="Equal to torch's CPU kernel where the sums are sequential (on a CPU).",
        kernels={"bincount": "histograms:bincount"},
    ),
    Op(
        name="median",
        status="patched",
        documented=("torch.median",),
        torch_does="Raises for the median along a dimension.",
        cause="The index is that of whichever of several equal elements a thread finds.",
        instead="A stable sort; the index is that of the element in the middle.",
        bits="The value is torch's; the index may differ where elements are equal.",
        kernels={"median.dim_values": "medians:median_dim"},
    ),
    Op(
        name="nanmedian",
        status="patched",
        torch_does="Raises for the median along a dimension.",
        cause="The index is that of whichever of several equal elements a thread finds.",
        instead="A stable sort; the index is that of the element in the middle.",
        bits="The value is torch's; the index may differ where elements are equal.",
        kernels={"nanmedian.dim_values": "medians:nanmedian_dim"},
    ),
    Op(
        name="topk",
        status="patched",
        torch_does="Nothing: it neither raises nor switches.",
        cause="Which of several equal elements are returned, and in which order, varies.",
        instead="A stable sort; of equal elements the first come first.",
        bits="The values are torch's; the indices may differ where elements are equal.",
        kernels={"topk": "medians:topk", "topk.values": "medians:topk"},
    ),
    Op(
        name="scatter_reduce_prod",
        status="patched",
        documented=("torch.Tensor.scatter_reduce",),
        torch_does="Raises for reduce='prod'.",
        cause="The threads that meet on one place multiply in no fixed order.",
        instead="The factors are sorted by where they go; each place multiplies its own, in order.",
        bits=(
            "Equal to torch's CPU kernel for float32, float64 and integers (on a CPU); half and "
            "bfloat16 are multiplied in float32."
        ),
        kernels={
            "scatter_reduce.two": "scattering:scatter_reduce",
            "scatter_reduce.two_out": "scattering:scatter_reduce",
            "scatter_reduce_.two": "scattering:scatter_reduce_",
        },
    ),
    Op(
        name="scatter_with_reduce",
        status="patched",
        torch_does=(
            "Raises on CUDA for scatter with a tensor and reduce='add' or 'multiply'; its "
            "documentation does not say so."
        ),
        cause="The threads that meet on one place add or multiply in no fixed order.",
        instead="The elements are sorted by where they go; each place reduces its own, in order.",
        bits=(
            "Equal to torch's CPU kernel for float32, float64 and integers (on a CPU); half and "
            "bfloat16 are reduced in float32."
        ),
        kernels={
            "scatter.reduce": "scattering:scatter",
            "scatter.reduce_out": "scattering:scatter",
            "scatter_.reduce": "scattering:scatter_",
        },
    ),
    Op(
        name="index_reduce",
        status="patched",
        torch_does="Raises on CUDA, whatever the reduction; the docstring speaks of MPS alone.",
        cause="The threads that meet on one place reduce with atomics, in no fixed order.",
        instead="The slices are sorted by where they go; each place reduces its own, in order.",
        bits=(
            "Equal to torch's CPU kernel for float32, float64 and integers (on a CPU); half and "
            "bfloat16 are reduced in float32."
        ),
        kernels={
            "index_reduce": "index_reduction:index_reduce",
            "index_reduce.out": "index_reduction:index_reduce",
            "index_reduce_": "index_reduction:index_reduce_",
        },
    ),
    Op(
        name="index_add",
        status="offered",
        torch_does="Sorts by index and adds duplicates one by one: reported 7 times slower.",
        cause=ATOMICS,
        instead="The slices are sorted by where they go; each place adds its own, in order.",
        bits="Within a few rounding errors: the sum is formed first and then added to the tensor.",
        kernels={
            "index_add": "additions:index_add",
            "index_add.out": "additions:index_add",
            "index_add_": "additions:index_add_",
        },
    ),
    Op(
        name="scatter_add",
        status="offered",
        documented=("torch.Tensor.scatter_add_",),
        torch_does="Sorts by the index of the flat tensor and adds duplicates one by one.",
        cause="The threads that meet on one place add with atomics, in no fixed order.",
        instead="The elements are sorted by where they go; each place adds its own, in order.",
        bits="Equal to torch's CPU kernel for float32, float64 and integers (on a CPU).",
        kernels={
            "scatter_add": "scattering:scatter_add",
            "scatter_add.out": "scattering:scatter_add",
            "scatter_add_": "scattering:scatter_add_",
        },
    ),
    Op(
        name="index_put_accumulate",
        status="offered",
        documented=("torch.Tensor.index_put",),
        torch_does="Sorts by index and adds duplicates one by one.",
        cause="The threads that meet on one place add with atomics, on a CPU too.",
        instead="The values are sorted by where they go; each place adds its own, in order.",
        bits="Within a few rounding errors: the sum is formed first and then added to the tensor.",
        kernels={"_index_put_impl_": "additions:index_put_"},
    ),
    Op(
        name="embedding_dense_backward",
        status="offered",
        torch_does="Sorts by index and adds duplicates in parts whose number is fixed.",
        cause="None that is known: it is here for its speed.",
        instead="The rows are sorted by where they go; each place adds its own, in order.",
        bits="Equal to torch's CPU kernel on one thread for float32 and float64.",
        kernels={"embedding_dense_backward": "additions:embedding_dense_backward"},
    ),
)
