"""Catalog entries of ops that need no patch, or that no patch can help.

Many vary only while deterministic algorithms are off: torch itself switches.
"""

from typing import Any

from lightning_d9m.patches.catalog.op import LAST_STAYS, FlagEffect, Op, make_exempt

_UNNEEDED: dict[str, Any] = {"flag_effect": FlagEffect.UNNEEDED, "torch_does": "Runs as always."}

EXEMPT: tuple[Op, ...] = (
    make_exempt(
        "cumsum",
        "torch.cumsum",
        torch_does="Runs a deterministic kernel, although the docstring up to 2.13 says it raises.",
        cause="The parallel scan of floating point was split differently from run to run.",
        reason=(
            "torch fixed it and tests it (test_deterministic_cumsum); only the docstring is stale. "
            "Inside torch.compile the scan varies before 2.15."
        ),
    ),
    make_exempt(
        "resize_quantized",
        "torch.Tensor.resize_",
        flag_effect=FlagEffect.RAISES,
        torch_does="Raises for a quantized tensor, on a CPU too.",
        cause=(
            "The elements that a resize adds hold whatever was in memory; torch fills them for "
            "other dtypes when deterministic algorithms are on, but not for quantized ones."
        ),
        reason=(
            "No computation is nondeterministic: the new elements are uninitialized. Quantize a "
            "tensor of the new size instead of resizing a quantized one."
        ),
    ),
    make_exempt(
        "kthvalue",
        torch_does="Runs a deterministic kernel.",
        cause="The index was that of one of several equal elements; the threads decided which.",
        reason="torch fixed it and removed it from its list before 2.13.",
    ),
    make_exempt(
        "topk",
        torch_does="Runs kernels that write equal elements by prefix sums.",
        cause=(
            "On ROCm, and for some sizes from torch 2.13 on, threads reserve the places of equal "
            "elements with atomics."
        ),
    ),
    make_exempt(
        "avg_pool2d_backward",
        **_UNNEEDED,
        cause="None: each input reads the windows that cover it.",
        reason="torch's CUDA kernel is a gather.",
    ),
    make_exempt(
        "max_pool2d_backward",
        **_UNNEEDED,
        cause="None: each input reads the windows that may have chosen it.",
        reason="torch's CUDA kernels, of both memory formats, are gathers.",
    ),
    make_exempt(
        "upsample_nearest_backward",
        **_UNNEEDED,
        cause="None: each input reads the outputs that copied it.",
        reason="torch's CUDA kernels, in 1 to 3 dimensions, are gathers.",
    ),
    make_exempt(
        "scaled_dot_product_attention_backward",
        torch_does=(
            "Chooses deterministic backends and arguments, but only if nondeterminism is an error; "
            "with warn_only=True it warns once and stays nondeterministic."
        ),
        cause="Blocks of keys add to the gradient of the queries with atomics.",
        reason="torch is deterministic if deterministic algorithms are on without warn_only.",
        operators=(
            "_scaled_dot_product_flash_attention_backward",
            "_scaled_dot_product_efficient_attention_backward",
            "_scaled_dot_product_cudnn_attention_backward",
        ),
    ),
    make_exempt(
        "ctc_loss_cudnn",
        torch_does="Selects cuDNN's deterministic algorithm if cudnn.deterministic is set.",
        cause="cuDNN's default algorithm for CTC varies.",
        reason="The flag selects the deterministic algorithm; the native version is patched.",
        operators=("_cudnn_ctc_loss",),
    ),
    make_exempt(
        "rnn_cudnn",
        torch_does="Warns in the documentation of LSTM and RNN.",
        cause="cuBLAS may split a product over workspaces whose number depends on what else runs.",
        reason="CUBLAS_WORKSPACE_CONFIG=:4096:8 or :16:8, set before CUDA starts, fixes it.",
        operators=("_cudnn_rnn", "_cudnn_rnn_backward"),
    ),
    make_exempt(
        "embedding_max_norm",
        **_UNNEEDED,
        cause="max_norm rescales rows of the table in place while the forward pass reads them.",
        reason="Every thread rescales a row to the same value; still, avoid max_norm.",
    ),
    make_exempt(
        "flash_attn_package_backward",
        flag_effect=FlagEffect.OUT_OF_REACH,
        torch_does="Cannot affect it: the package has its own kernels.",
        cause="Blocks of keys add to the gradient of the queries with atomics.",
        reason="Pass deterministic=True to its functions, or set FLASH_ATTENTION_DETERMINISTIC=1.",
    ),
    make_exempt(
        "apple_devices",
        ", ".join(
            f"{name} (MPS)"
            for name in (
                "torch.Tensor.index_put",
                "torch.Tensor.index_reduce",
                "torch.kthvalue",
                "torch.nn.AvgPool3d",
                "torch.nn.Embedding",
                "torch.nn.EmbeddingBag",
                "torch.nn.MaxPool2d",
                "torch.nn.MaxPool3d",
                "torch.nn.functional.grid_sample",
                "torch.nn.functional.interpolate",
            )
        ),
        flag_effect=FlagEffect.RAISES,
        torch_does="Raises on an MPS device; documented from 2.15 on.",
        cause="As on CUDA, the threads that add to one place have no fixed order.",
        reason=(
            "The replacements are registered for CUDA and have not been run on an Apple device. "
            "torch raises there, so nothing varies unnoticed."
        ),
        since="2.15",
    ),
    make_exempt(
        "convolution",
        ", ".join(
            f"torch.nn.{kind}{dims}d" for kind in ("Conv", "ConvTranspose") for dims in (1, 2, 3)
        ),
        cause="cuDNN's fastest algorithms for the gradients add with atomics.",
        torch_does="Selects cuDNN's deterministic algorithms.",
        operators=("convolution_backward",),
    ),
    make_exempt(
        "bmm_sparse",
        "torch.bmm",
        cause="cuSPARSE adds the products of a sparse matrix in no fixed order.",
        torch_does="Selects cuSPARSE's deterministic algorithm.",
    ),
    make_exempt(
        "sparse_mm",
        flag_effect=FlagEffect.NONE,
        torch_does="Runs as always: it does not ask whether algorithms must be deterministic.",
        cause="cuSPARSE's algorithm for a sparse matrix times a dense one promises no fixed order.",
        reason=(
            "Coalesce the matrix, and multiply by torch.bmm(matrix[None], dense[None])[0], for "
            "which torch selects a deterministic algorithm."
        ),
        operators=("_sparse_mm", "_sparse_addmm"),
    ),
    make_exempt(
        "index_put",
        "torch.Tensor.index_put",
        cause=LAST_STAYS,
        operators=("_unsafe_index_put",),
    ),
    make_exempt("scatter", "torch.Tensor.scatter", cause=LAST_STAYS),
    make_exempt("scatter_reduce_sum", "torch.Tensor.scatter_reduce"),
    make_exempt("index_copy", "torch.Tensor.index_copy", cause=LAST_STAYS),
    make_exempt("gather_backward", "torch.gather"),
    make_exempt("index_select_backward", "torch.index_select"),
    make_exempt("repeat_interleave_backward", "torch.repeat_interleave"),
)
