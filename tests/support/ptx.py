"""An interpreter of PTX in NumPy: compiled kernels run without a device, and are checked.

All threads of a launch step together, the least position first, so diverged threads meet again.
Atomics of one instruction are done in a random order. A launch raises PtxError at

- an access outside of the tensors, or one that is not aligned;
- a read of bytes that nobody wrote;
- a race: an access to bytes that another thread of the launch stored, without a barrier between,
  or a read past the L2 cache's side of bytes that atomics change;
- an atomic addition of floating point that rounds, or of another format than float64.

It has the instructions that our kernels use; memory order is not modeled.
"""

import ctypes
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

GAP = 4096  # bytes between tensors
WARP = 32
COMPARISONS: dict[str, Callable[..., np.ndarray]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
BINARY: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor, "max": np.fmax, "min": np.fmin,
}  # fmt: skip


class PtxError(Exception):
    """A kernel does what it must not do."""


class Program(NamedTuple):
    """A kernel: the names of its parameters, instructions, labels, threads of a block.

    An instruction is the predicate that guards it, its parts between dots, and its operands.
    """

    parameters: list[str]
    instructions: list[tuple[str, list[str], list[str]]]
    labels: dict[str, int]
    threads: int


@cache
def parse(text: str) -> Program:
    """Return the only kernel of a text."""
    text = re.sub(r"//[^\n]*", "", text)
    head = re.search(r"\.visible \.entry \w+\((.*?)\)(.*?)\{", text, re.DOTALL)
    assert head is not None
    parameters = re.findall(r"\.param .*?(\w+)(?=,|\s*$)", head[1], re.DOTALL)
    threads = re.search(r"\.reqntid (\d+)", head[2])
    assert threads is not None
    instructions, labels = [], {}
    for line in map(str.strip, re.split(r"[;\n]", text[head.end() :])):
        if label := re.match(r"(\$\w+):", line):
            labels[label[1]] = len(instructions)
        elif match := re.match(r"(?:@(!?%\w+)\s+)?([a-z]\w*(?:\.\w+)*)\s*(.*)$", line):
            operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", match[3])
            instructions.append((match[1] or "", match[2].split("."), operands))
    return Program(parameters, instructions, labels, int(threads[1]))


def find_type(name: str) -> np.dtype:
    """Return the type of a suffix such as ``s32``."""
    if name in {"pred", "bf16"}:
        return np.dtype("u1" if name == "pred" else "u2")
    kinds = {"b": "u", "u": "u", "s": "i", "f": "f"}
    return np.dtype(f"{kinds[name[0]]}{int(name[1:]) // 8}")


class Memory:
    """The tensors of a launch, at addresses with gaps between them.

    Args:
        tensors: They may share storages.
        unwritten: Those whose bytes nobody wrote yet.
    """

    def __init__(self, tensors: Sequence[Tensor], unwritten: Sequence[Tensor] = ()) -> None:
        storages = {part.untyped_storage().data_ptr(): part.untyped_storage() for part in tensors}
        self.places, end = {}, GAP
        for pointer, storage in storages.items():
            self.places[pointer] = (end, storage)
            end += (storage.nbytes() + 2 * GAP) // GAP * GAP
        self.content = np.zeros(end, np.uint8)
        self.is_there, self.is_written = np.zeros((2, end), bool)
        for begin, storage in self.places.values():
            side = slice(begin, begin + storage.nbytes())
            self.content[side] = _as_bytes(storage)
            self.is_there[side] = self.is_written[side] = True
        for part in unwritten:
            begin = self.find(part)
            self.is_written[begin : begin + part.nbytes] = False

    def find(self, tensor: Tensor) -> int:
        """Return the address of a tensor."""
        pointer = tensor.untyped_storage().data_ptr()
        return self.places[pointer][0] + tensor.data_ptr() - pointer

    def write_back(self) -> None:
        """Write what the kernel stored into the tensors."""
        for begin, storage in self.places.values():
            _as_bytes(storage)[:] = self.content[begin : begin + storage.nbytes()]


def _as_bytes(storage: torch.UntypedStorage) -> np.ndarray:
    memory = (ctypes.c_uint8 * max(storage.nbytes(), 1)).from_address(storage.data_ptr() or 1)
    return np.frombuffer(memory, np.uint8)[: storage.nbytes()]


class Run:
    """A launch of a program.

    Args:
        program: The kernel.
        shared: The bytes of shared memory of a block.
        blocks: Their number.
        memory: The tensors.
        arguments: Addresses and numbers.
        draws: Draws the order of atomics.
    """

    def __init__(
        self, program: Program, shared: int, blocks: int, memory: Memory,
        arguments: Sequence[int], draws: np.random.Generator,
    ) -> None:  # fmt: skip
        self.program, self.memory, self.draws = program, memory, draws
        self.count = blocks * program.threads
        self.thread = np.arange(self.count)
        self.block, in_block = np.divmod(self.thread, program.threads)
        self.registers = {"%tid.x": in_block, "%ctaid.x": self.block, "%laneid": in_block % WARP}
        self.registers["%nctaid.x"] = np.full(self.count, blocks)
        self.registers = {name: bits.astype(np.uint64) for name, bits in self.registers.items()}
        self.shared = np.zeros((blocks, shared), np.uint8)
        self.shared_written = np.zeros((blocks, shared), bool)
        self.arguments = dict(zip(program.parameters, arguments, strict=False))
        self.barriers = np.zeros(self.count, np.int64)
        size = len(memory.content)
        self.writer, self.written_at = np.full(size, -1), np.zeros(size, np.int64)
        self.is_atomic = np.zeros(size, bool)

    def run(self) -> None:
        """Execute all instructions, and write back."""
        position, end = np.zeros(self.count, np.int64), len(self.program.instructions)
        with np.errstate(all="ignore"):
            while (current := int(position.min())) < end:
                guard, parts, operands = self.program.instructions[current]
                here = position == current
                active = here
                if guard:
                    active = here & (self.read(guard.lstrip("!"), "b8") != guard.startswith("!"))
                position[here] += 1
                if parts[0] == "bra":
                    position[active] = self.program.labels[operands[0]]
                elif parts[0] == "ret":
                    position[active] = end
                elif active.any():
                    try:
                        self.execute(parts, operands, active)
                    except PtxError as error:
                        raise PtxError(
                            f"{error}: {'.'.join(parts)} {', '.join(operands)}"
                        ) from None
        self.memory.write_back()

    def read(self, operand: str, kind: str) -> np.ndarray:
        """Return the value of an operand for each thread."""
        dtype = find_type(kind)
        bits = np.dtype(f"u{dtype.itemsize}")
        if operand.startswith("{"):  # the parts of a value, the lowest bits first
            parts = [one.strip() for one in operand.strip("{} ").split(",")]
            each = dtype.itemsize // len(parts)
            joined = np.stack([self.read(one, f"b{8 * each}") for one in parts], 1)
            values = np.ascontiguousarray(joined).view(bits)[:, 0]
        elif operand.startswith("%"):
            values = self.registers.get(operand)
            values = np.zeros(self.count, np.uint64) if values is None else values
        elif operand == "global_smem":
            values = np.zeros(self.count, np.uint64)
        else:
            number = int(operand.replace("0d", "0x").replace("0f", "0x"), 0)
            values = np.full(self.count, number & (2**64 - 1), np.uint64)
        return values.astype(bits).view(dtype)

    def write(self, name: str, values: np.ndarray, active: np.ndarray) -> None:
        """Write a register of the active threads, or parts of a value to several."""
        values = np.ascontiguousarray(values)
        if name.startswith("{") and "," in name:
            parts = [one.strip() for one in name.strip("{} ").split(",")]
            split = values.view(f"u{values.itemsize // len(parts)}").reshape(-1, len(parts))
            for one, part in zip(parts, split.T, strict=True):
                self.write(one, part, active)
            return
        bits = values.view(f"u{values.itemsize}").astype(np.uint64)
        self.registers[name] = np.where(active, bits, self.registers.get(name, np.uint64(0)))

    def execute(self, parts: Sequence[str], operands: Sequence[str], active: np.ndarray) -> None:
        """Execute an instruction that is no branch."""
        name, kind = parts[0], parts[-1]
        if name in {"ld", "st", "ldmatrix"} and parts[1] != "param":
            self.move(parts, operands, active)
        elif name in {"red", "atom"}:  # what an atom returns is not used
            self.update(parts, operands[-2:], active)
        elif name == "bar":
            self.barriers[active] += 1
        elif name == "ld":
            value = np.full(self.count, self.arguments[operands[1].strip("[]")] & (2**64 - 1), "u8")
            self.write(operands[0], value.astype(find_type(kind)), active)
        else:
            self.write(operands[0], self.compute(parts, operands, active), active)

    def compute(  # noqa: PLR0911 - one case for each kind of instruction
        self, parts: Sequence[str], operands: Sequence[str], active: np.ndarray
    ) -> np.ndarray:
        """Return the result of an instruction that only reads registers."""
        name, kind = "mul.hi" if "hi" in parts else parts[0], parts[-1]
        if name == "setp":
            left, right = (read_wide(self.read(one, kind), kind) for one in operands[1:])
            return compare(parts[1], left, right).astype(np.uint8)
        if name == "cvt":
            given = self.read(operands[1], kind)
            if "ftz" in parts:  # subnormal numbers are zeros
                given = np.where(np.abs(given) < np.finfo(given.dtype).tiny, given * 0, given)
            return convert(np.floor(given) if "rmi" in parts else given, kind, parts[-2])
        if name == "selp":
            first, second = (self.read(one, kind) for one in operands[1:3])
            return np.where(self.read(operands[3], "b8") != 0, first, second)
        first, *rest = (self.read(one, kind) for one in operands[1:])
        dtype, bits = first.dtype, first.itemsize * 8
        if "wide" in parts:
            wide = kind[0] + str(2 * bits)
            product = first.astype(find_type(wide)) * rest[0]
            return product + self.read(operands[3], wide) if name == "mad" else product
        if name in {"shl", "shr"}:
            steps = self.read(operands[2], "u32")
            shift = np.left_shift if name == "shl" else np.right_shift
            moved = shift(first, np.minimum(steps, bits - 1).astype(dtype))
            return np.where((steps < bits) | (kind[0] == "s"), moved, 0).astype(dtype)
        if name in {"div", "rem"} and kind[0] != "f":
            quotient = np.trunc(first.astype(np.longdouble) / np.where(rest[0] == 0, 1, rest[0]))
            quotient = quotient.astype(dtype)
            return quotient if name == "div" else first - quotient * rest[0]
        if name == "redux":
            warps = np.where(active, first, np.iinfo(dtype).min).reshape(-1, WARP)
            return np.repeat(warps.max(1), WARP)
        more = {
            "mov": lambda: first, "neg": lambda: -first, "mad": lambda: first * rest[0] + rest[1],
            "not": lambda: first ^ 1 if kind == "pred" else ~first,
            "div": lambda: first / rest[0], "abs": lambda: np.abs(first),
            "sqrt": lambda: np.sqrt(first), "fma": lambda: fuse(first, *rest),
            "copysign": lambda: np.copysign(rest[0], first),
            "bfe": lambda: (first << bits - rest[0] - rest[1]) >> bits - rest[1],
            "mul.hi": lambda: (first.astype(object) * rest[0].astype(object)) >> bits,
            "shfl": lambda: first[self.thread ^ rest[0].astype(np.int64)],  # the other of a pair
        }  # fmt: skip
        if name not in BINARY and name not in more:
            raise PtxError("unknown instruction")
        return (BINARY[name](first, rest[0]) if name in BINARY else more[name]()).astype(dtype)

    def find(self, operand: str) -> np.ndarray:
        """Return the addresses of an operand in brackets."""
        base, _, offset = operand.strip("[] ").partition("+")
        return self.read(base.strip(), "b64").astype(np.int64) + int(offset or 0)

    def move(self, parts: Sequence[str], operands: Sequence[str], active: np.ndarray) -> None:
        """Load or store one value or several."""
        is_store = parts[0] == "st"
        address, names = self.find(operands[not is_store]), operands[is_store].strip("{} ")
        size, names = find_type(parts[-1]).itemsize, [one.strip() for one in names.split(",")]
        if parts[0] == "ldmatrix":  # lane 8 k + r has the address of row r of matrix k
            lane, size = self.thread % WARP, 4
            rows = self.thread - lane + lane // 4
        for number, name in enumerate(names):
            where = address + number * size
            if parts[0] == "ldmatrix":
                where = address[rows + 8 * number] + lane % 4 * 4
            place = where[active, None] + np.arange(size)
            if (where[active] % size).any():
                raise PtxError("not aligned")
            values = self.read(name, f"b{8 * size}")
            bits = values[active, None].view(np.uint8)
            access = self.access_shared if "shared" in parts else self.access_global
            found = access(place, bits if is_store else None, active, by_l2="cg" in parts)
            if not is_store:
                values[active] = np.ascontiguousarray(found).view(values.dtype)[:, 0]
                self.write(name, values, active)

    def access_shared(
        self, place: np.ndarray, bits: np.ndarray | None, active: np.ndarray, *, by_l2: bool
    ) -> np.ndarray:
        """Read or write shared memory."""
        assert not by_l2
        block = self.block[active, None]
        if place.min() < 0 or place.max() >= self.shared.shape[1]:
            raise PtxError("outside of the shared memory")
        if bits is not None:
            self.shared[block, place], self.shared_written[block, place] = bits, True
        elif not self.shared_written[block, place].all():
            raise PtxError("reads shared memory that nobody wrote")
        return self.shared[block, place]

    def access_global(
        self, place: np.ndarray, bits: np.ndarray | None, active: np.ndarray, *, by_l2: bool
    ) -> np.ndarray:
        """Read or write tensors."""
        memory, thread = self.memory, self.thread[active, None]
        self.require_memory(place)
        other = (self.writer[place] >= 0) & (self.writer[place] != thread)
        met = self.written_at[place] < self.barriers[active, None]
        near = self.block[self.writer[place]] == self.block[active, None]
        if (other & ~(met & near)).any():
            raise PtxError("race: another thread stored there")
        if bits is None:
            if not memory.is_written[place].all():
                raise PtxError("reads what nobody wrote")
            if not by_l2 and self.is_atomic[place].any():
                raise PtxError("reads what atomics change, but not from the L2 cache")
            return memory.content[place]
        first = place[:, 0]
        if len(np.unique(first)) < len(first):
            raise PtxError("race: two threads store to one place")
        memory.content[place], memory.is_written[place] = bits, True
        self.writer[place], self.written_at[place] = thread, self.barriers[active, None]
        return bits

    def require_memory(self, place: np.ndarray) -> None:
        """Raise unless all bytes belong to tensors."""
        there = self.memory.is_there
        if place.min() < 0 or place.max() >= len(there) or not there[place].all():
            raise PtxError("outside of the tensors")

    def update(self, parts: Sequence[str], operands: Sequence[str], active: np.ndarray) -> None:
        """Do atomics, one after the other."""
        action, dtype = parts[-2], find_type(parts[-1])
        if dtype.kind == "f" and (action, parts[-1]) != ("add", "f64"):
            raise PtxError("an atomic that rounds")
        address, values = self.find(operands[0]), self.read(operands[1], parts[-1])
        place = address[active, None] + np.arange(dtype.itemsize)
        self.require_memory(place)
        if (address[active] % dtype.itemsize).any():
            raise PtxError("not aligned")
        if not self.memory.is_written[place].all():
            raise PtxError("changes what nobody wrote")
        if (self.writer[place] >= 0).any():
            raise PtxError("race: a thread stored there")
        self.is_atomic[place] = True
        content = self.memory.content.view(dtype)
        for thread in self.draws.permutation(self.thread[active]):
            where = address[thread] // dtype.itemsize
            old, value = content[where], values[thread]
            content[where] = new = max(old, value) if action == "max" else old + value
            given = new - old
            if dtype.kind == "f" and np.isfinite(new) and (old - (new - given)) + (value - given):
                raise PtxError(f"an atomic that rounds {float(old).hex()} + {float(value).hex()}")


def read_wide(values: np.ndarray, kind: str) -> np.ndarray:
    """Return bfloat16 as float32, and other values as they are."""
    return (values.astype(np.uint32) << 16).view(np.float32) if kind == "bf16" else values


def fuse(left: np.ndarray, right: np.ndarray, added: np.ndarray) -> np.ndarray:
    """Return ``left * right + added``, rounded once: of float32 numbers first to an odd float64."""
    if left.dtype == np.float64:
        exact = np.vectorize(lambda a, b, c: float(Fraction(a) * Fraction(b) + Fraction(c)))
        return exact(left, right, added)  # type: ignore[no-any-return] # of finite numbers
    product, wide = left.astype(np.float64) * right, added.astype(np.float64)
    total = product + wide
    given = total - product
    error = (product - (total - given)) + (wide - given)
    bits = total.view(np.int64)
    is_even = (bits & 1 == 0) & (np.abs(error) > 0)
    bits = bits + is_even * np.where((error > 0) == (bits >= 0), 1, -1)
    return bits.view(np.float64).astype(np.float32)


def compare(how: str, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the result of a comparison; ``u`` at its end stands for true if one is a NaN."""
    is_nan = (left != left) | (right != right)  # noqa: PLR0124 - of integers there is none
    if how in {"num", "nan"}:
        return is_nan == (how == "nan")
    result = COMPARISONS[how[:2]](left, right)
    return result | is_nan if how.endswith("u") else result & ~is_nan


def convert(values: np.ndarray, source: str, target: str) -> np.ndarray:
    """Return values of another type, rounded to nearest."""
    values = read_wide(values, source)
    if target != "bf16":
        return values.astype(find_type(target))
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)


APART = 44  # the binary logarithm of the distance of two tensors


class Block(Run):
    """One block of a launch, whose tensors are too large for this machine and hold zeros.

    Attributes:
        touched: The bytes of each tensor that are read or changed, the least and the greatest.
    """

    def __init__(self, program, shared, number, blocks, sizes, arguments) -> None:
        memory = SimpleNamespace(content=np.zeros(1, np.uint8), write_back=lambda: None)
        super().__init__(program, shared, 1, memory, arguments, np.random.default_rng(0))
        for name, value in {"%ctaid.x": number, "%nctaid.x": blocks}.items():
            self.registers[name] = np.full(self.count, value, np.uint64)
        self.sizes, self.touched, self.left = sizes, {}, 5000

    def execute(self, parts, operands, active):
        self.left -= 1
        if not self.left:
            raise PtxError("does not end")
        super().execute(parts, operands, active)

    def access_global(self, place, bits, active, *, by_l2):
        tensor, place = int(place.min() >> APART), place & (2**APART - 1)
        if place.max() >= self.sizes.get(tensor, 0):
            raise PtxError("outside of the tensors")
        found = self.touched.get(tensor, (place.min(), place.max()))
        self.touched[tensor] = min(found[0], place.min()), max(found[1], place.max())
        return np.zeros(place.shape, np.uint8)

    def update(self, parts, operands, active):
        address = self.find(operands[0])[active]
        self.access_global(address[:, None] + np.arange(8), None, active, by_l2=True)
