"""Triton kernels of the patches as they are launched: PTX, registers, spills; without a GPU.

``executed.py`` compiles launches with it, and executes the result.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

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
