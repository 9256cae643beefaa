"""Kernels."""

import torch
import triton
import triton.language as tl
from flash_attn import flash_attn_func


@triton.autotune(  # expect: D9M106
    configs=[triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})],
    key=["n"],
)
@triton.jit
def tuned(x, n, BLOCK: tl.constexpr):
    tl.store(x, tl.sum(tl.load(x + tl.arange(0, BLOCK))))  # fine


@triton.autotune(configs=[triton.Config({"BLOCK": 64})], key=["n"])  # fine
@triton.jit
def fixed(x, n, BLOCK: tl.constexpr):
    tl.store(x, tl.sum(tl.load(x + tl.arange(0, BLOCK))))  # fine


def attend(q, k, v):
    a = flash_attn_func(q, k, v, causal=True)  # expect: D9M104
    b = flash_attn_func(q, k, v, causal=True, deterministic=True)  # fine
    return torch.stack([a, b])  # fine
