"""Launches, bytes, registers and spills of the patches' Triton kernels, without a GPU.

    python benchmarks/ops/triton_kernels.py -o benchmarks/results/triton-kernels.json

Each workload of patch_workloads.py runs on the CPU with its Triton launches recorded instead of
run. The recorded kernels are then compiled for several architectures. Bytes are counted from the
shapes: each tensor of a launch once, what atomics change twice, and a fill with zeros. Of torch's
own kernel with atomics at least these are moved: the result is filled with zeros, then read and
written; every other tensor is read once.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from patch_workloads import WORKLOADS, Workload
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from lightning_d9m.ops.patches.catalog.catalog import find_op
from lightning_d9m.ops.patches.registration import patches_applied
from lightning_d9m.ops.patches.triton import launch

CAPABILITIES = (80, 90, 100)
_TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "i1",
}
_INT32_LIMIT = 2**31
_compiled: dict[str, dict[str, Any]] = {}
_ATOMIC = re.compile(r"\b(atom|red)\.")
# Operators of torch that start no kernel on a device.
_NO_KERNEL = re.compile(
    r"aten::(_?reshape\w*|_?to_copy|\w*view\w*|empty\w*|as_strided\w*|set_\w*|unsqueeze|squeeze|"
    r"expand|select|slice|narrow|detach|resolve_\w*|flatten|contiguous|clone|to|result_type|"
    r"transpose|permute|movedim|split|chunk|zeros\w*|ones\w*|lift_fresh|alias|\w+_backward\w*|"
    r"item|_local_scalar_dense|resize_|full\w*|unbind|t|is_\w+|new_\w+)$"
)


@dataclass(frozen=True)
class Launch:
    """A launch that was recorded.

    Attributes:
        kernel: The kernel.
        signature: The type of each argument.
        constants: The compile-time constants.
        aligned: The positions of the arguments that are divisible by 16.
        options: Options of the compiler.
        tensors: The tensors among the arguments.
    """

    kernel: Any
    signature: dict[str, Any]
    constants: dict[str, Any]
    aligned: tuple[tuple[int, ...], ...]
    options: dict[str, Any]
    tensors: tuple[Tensor, ...]

    def find(self, *names: str) -> list[Tensor]:
        """Return the tensors of these names."""
        known = [name for name, kind in self.signature.items() if kind[0] == "*"]
        return [self.tensors[known.index(name)] for name in names if name in known]


@contextmanager
def launches_recorded() -> Iterator[list[Launch]]:
    """Record launches of Triton kernels on CPU tensors in place of running them."""
    recorded: list[Launch] = []

    def record(self: Any, *args: Any, **kwargs: Any) -> None:
        del kwargs["grid"], kwargs["warmup"]
        given = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        recorded.append(describe_launch(self, given))

    original, check = JITFunction.run, launch._check  # noqa: SLF001 - nothing is computed
    JITFunction.run, launch._check = record, lambda *_: None  # noqa: SLF001 - as above
    launch._device_types.add("cpu")  # noqa: SLF001 - kernels run on CUDA only
    try:
        yield recorded
    finally:
        JITFunction.run, launch._check = original, check  # noqa: SLF001 - as above
        launch._device_types.discard("cpu")  # noqa: SLF001 - as above


def describe_launch(kernel: Any, given: dict[str, Any]) -> Launch:
    signature: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    aligned: list[tuple[int, ...]] = []
    tensors: list[Tensor] = []
    for position, parameter in enumerate(kernel.params):
        name, value = parameter.name, given.pop(parameter.name)
        is_integer = isinstance(value, int) and not parameter.do_not_specialize
        if parameter.is_constexpr or (is_integer and value == 1):
            signature[name], constants[name] = "constexpr", value
            continue
        signature[name] = _describe_type(value)
        if isinstance(value, Tensor):
            tensors.append(value)
        if (value.data_ptr() if isinstance(value, Tensor) else value * is_integer or 1) % 16 == 0:
            aligned.append((position,))
    return Launch(kernel, signature, constants, tuple(aligned), given, tuple(tensors))


def _describe_type(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_describe_type, value))
    if isinstance(value, Tensor):
        return f"*{_TYPES[value.dtype]}"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -_INT32_LIMIT <= value < _INT32_LIMIT else "i64"


def compile_kernel(recorded: Launch, capability: int) -> dict[str, Any]:
    """Compile a kernel and return its registers, spilled bytes and atomic instructions.

    A variant is compiled once.
    """
    variant = repr((replace(recorded, tensors=()), capability))
    if variant not in _compiled:
        _compiled[variant] = _compile(recorded, capability)
    return _compiled[variant]


def compile_ptx(recorded: Launch, capability: int) -> Any:
    """Return Triton's compiled kernel."""
    source = ASTSource(
        recorded.kernel,
        recorded.signature,
        recorded.constants,
        {position: [["tt.divisibility", 16]] for position in recorded.aligned},
    )
    return triton.compile(source, GPUTarget("cuda", capability, 32), recorded.options)


def _compile(recorded: Launch, capability: int) -> dict[str, Any]:
    compiled = compile_ptx(recorded, capability)
    assembler = get_ptxas(capability).path
    suffix = "a" if capability >= 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "kernel.ptx"
        text.write_text(compiled.asm["ptx"])
        output = Path(folder) / "kernel.cubin"
        target = f"--gpu-name=sm_{capability}{suffix}"
        run = subprocess.run(
            [assembler, "-v", target, text, "-o", output],
            check=False,
            capture_output=True,
            text=True,
        )
        if run.returncode:
            raise RuntimeError(run.stdout + run.stderr)
        # In the machine code, because the assembler could replace one by a loop; it adds none.
        atomics = _list_atomics(output) if _ATOMIC.search(compiled.asm["ptx"]) else set()
    registers = re.search(r"Used (\d+) registers", run.stderr)
    stack = re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", run.stderr
    )
    assert registers is not None
    assert stack is not None
    frame, stores, loads = map(int, stack.groups())
    return {
        "registers": int(registers[1]),
        "stack": frame,
        "spilled": stores + loads,
        "atomics": sorted(atomics),
    }


def _list_atomics(code: Path) -> set[str]:
    disassembler = triton.knobs.nvidia.nvdisasm.path
    run = subprocess.run([disassembler, "-c", code], check=True, capture_output=True, text=True)
    return set(re.findall(r"\b((?:ATOM|RED)[A-Z]*\.[\w.]+)", run.stdout))


def run_workload(workload: Workload) -> tuple[list[Launch], dict[str, int]]:
    """Return the launches of a workload, and how often it calls each operator of torch."""
    with patches_applied("CPU"):
        call = workload.make("cpu")
        with launches_recorded() as recorded, torch.profiler.profile() as profile:
            call()
    torch_ops = {
        event.key: event.count
        for event in profile.key_averages()
        if event.key.startswith("aten::") and not _NO_KERNEL.match(event.key)
    }
    return recorded, torch_ops


def count_bytes(recorded: list[Launch]) -> tuple[int, int]:
    """Return the bytes that launches move, and those of a kernel with atomics at least."""
    moved = sum(map(_count_launch, recorded))
    # The memory of sums and exponents is filled first.
    zeroed = {part.data_ptr(): part for one in recorded for part in one.find("sums")}
    moved += sum(map(_count_tensor, zeroed.values()))
    # What one launch writes and the next one reads is not there with atomics.
    (result,) = recorded[-1].find("out")
    written = {one.find("out")[0].data_ptr() for one in recorded}
    needed = {
        tensor.data_ptr(): _count_tensor(tensor)
        for one in recorded
        for tensor in (*one.find("source", "values", "index"), result)
        if tensor is result or tensor.data_ptr() not in written
    }
    return moved, sum(needed.values()) + 2 * result.numel() * result.itemsize


def _count_launch(recorded: Launch) -> int:
    """Return the bytes of a launch; what atomics change is read and written."""
    constants, tensors = recorded.constants, recorded.tensors
    if "FIRST" not in constants:
        return sum(map(_count_tensor, tensors))
    terms = ("values", "weights", "index", "tops")
    names = ((*terms, "tops"), (*terms, "sums", "sums"), ("sums", "out"))[constants["FIRST"]]
    names += ("out",) if constants["INCLUDE"] else ()
    names += ("tops",) if constants["LAST"] == 2 and not constants["BITS"] else ()
    if not constants["WEIGHTED"]:
        names = tuple(name for name in names if name != "weights")
    (out,) = recorded.find("out")
    own = {"tops": 4 * out.numel(), "sums": 8 * constants["PIECES"] * out.numel()}
    return sum(own.get(name) or _count_tensor(recorded.find(name)[0]) for name in names)


def _count_tensor(tensor: Tensor) -> int:
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())


def main() -> None:
    """Write one row for each workload that launches a Triton kernel."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--only", default="", help="a part of the op's name")
    parser.add_argument("--no-compile", action="store_true", help="only count")
    arguments = parser.parse_args()
    rows = []
    for workload in WORKLOADS:
        if arguments.only not in workload.op or find_op(workload.op).status == "exempt":
            continue
        recorded, torch_ops = run_workload(workload)
        if not recorded:
            continue
        moved, atomics = count_bytes(recorded)
        rows.append(
            {
                "op": workload.op,
                "shape": workload.shape,
                "kernels": [one.kernel.__name__ for one in recorded],
                "launches": len(recorded),
                "torch_ops": torch_ops,
                "bytes": moved,
                "bytes_with_atomics": atomics,
                "compiled": {
                    f"sm_{capability}": [compile_kernel(one, capability) for one in recorded]
                    for capability in (() if arguments.no_compile else CAPABILITIES)
                },
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    facts = {"triton": triton.__version__, "torch": torch.__version__, "rows": rows}
    arguments.output.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
