"""Triton kernels on CPU tensors, as on a device: by the interpreter of PTX."""

import re
from contextlib import contextmanager
from functools import cache
from unittest.mock import patch

import numpy as np
from ptx import APART, Block, Memory, Run, parse
from torch import Tensor

from lightning_d9m.ops.patches.triton import launch
from lightning_d9m.ops.portability import kernels

# An assembler may fuse operations that do not say how they round; others approximate.
INEXACT = re.compile(r"\b(?:(?:add|sub|mul|div|sqrt|fma)\.(?!rn\.f)[\w.]*f|\w+\.(?:ftz|approx))\w*")


@cache
def find_inexact(text):
    return INEXACT.findall(text)


@contextmanager
def executed(capability=90, *, exact=True, check=lambda *_: None):
    """Replace operations by Triton kernels; return a list of what is launched.

    Each instruction must say that it rounds to nearest, unless ``exact`` is false. ``check`` takes
    the place of the comparison of an example.
    """
    launches = []
    # Not at the top, because the tests skip platforms without Triton.
    import triton_kernels
    from triton.runtime.jit import JITFunction

    find_kernel = kernels.find_kernel

    def run(self, *args, grid, warmup, **options):
        given = dict(zip(self.arg_names, args, strict=False)) | options
        one = triton_kernels.describe_launch(self, dict(given))
        compiled = triton_kernels.compile_ptx(one, capability)
        assert not exact or find_inexact(compiled.asm["ptx"]) == []
        unwritten = one.find("out") if not one.constants.get("INCLUDE") else []
        if one.kernel.__name__ == "sample_image":
            unwritten += one.find("index", "weights")
        memory = Memory(one.tensors, unwritten)
        arguments = [
            memory.find(given[name]) if isinstance(given[name], Tensor) else given[name]
            for name, kind in one.signature.items()
            if kind != "constexpr"
        ]
        program, draws = parse(compiled.asm["ptx"]), np.random.default_rng(len(launches))
        launches.append(one)
        Run(program, compiled.metadata.shared, grid[0], memory, arguments, draws).run()

    with (
        patch.object(JITFunction, "run", run),
        patch.object(launch, "_device_types", {"cpu"}),
        patch.object(launch, "_withdrawn", set()),
        patch.object(launch, "_checked", set()),
        patch.object(launch, "_check", check),
        # Random numbers are drawn on the CPU for every device.
        patch.object(
            kernels, "find_kernel", lambda name, x: find_kernel(name, x) if name == "draw" else None
        ),
    ):
        yield launches


@contextmanager
def recorded():
    """Return a list of what is launched meanwhile, which does not run: arguments and programs."""
    import triton_kernels
    from triton.runtime.jit import JITFunction

    seen = []

    def run(self, *args, grid, warmup, **options):
        named = dict(zip(self.arg_names, args, strict=False)) | options
        seen.append((triton_kernels.describe_launch(self, dict(named)), named, grid[0]))

    with patch.object(JITFunction, "run", run):
        yield seen


def run_block(one, named, block, blocks, sizes):
    """Execute one block of a recorded launch, whose tensors have these sizes in bytes."""
    import triton_kernels

    compiled = triton_kernels.compile_ptx(one, 90)
    arguments, number = [], 0
    for name in (name for name, kind in one.signature.items() if kind != "constexpr"):
        number += isinstance(named[name], Tensor)
        arguments.append(number << APART if isinstance(named[name], Tensor) else named[name])
    program, known = parse(compiled.asm["ptx"]), dict(enumerate(sizes, 1))
    run = Block(program, compiled.metadata.shared, block, blocks, known, arguments)
    run.run()
    return run
