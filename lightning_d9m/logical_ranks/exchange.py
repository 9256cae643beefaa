"""The sum of the roots that all processes hold, by any of three exchanges with the same bits.

The processes of one host write their roots to memory that all of them read: process ``q`` folds the
``q``-th part of each chunk there, and all copy the results. Processes of several hosts do the same
by messages, and devices by an all-to-all and an all-gather. With one root for each process these
send as many bytes as a ring all-reduce.

The tree alone decides the order of every addition, so the choice of the exchange, of chunks and of
shards changes no bit. There is one exception: which of two NaNs an addition returns is up to the
processor. Therefore every NaN of a result is replaced by torch's ``nan``.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from lightning_d9m.logical_ranks.accumulation import add_wide, is_half, split_in_chunks
from lightning_d9m.logical_ranks.shared_memory import SLOT_BYTES, SharedMemory, open_shared_memory
from lightning_d9m.logical_ranks.tree import Blocks, Fold, list_roots

# A send waits for what is being received, so few messages are fast; small ones overlap more.
MESSAGE_BYTES = 6 * 2**20
# The tags of messages: those of one tag arrive in their order, however long others take.
_ROOTS, _RESULTS = 0x0D9A, 0x0D9B
STEP = 16  # shards begin at multiples of 64 bytes of float32


class RootExchange:
    """Sums the roots of all processes.

    All processes must start the same sums in the same order, and finish them in that order.

    Args:
        blocks: The logical ranks of all processes.
        process: This process.
        group: The process group of torch.distributed whose ranks are the processes; None is the
            default group. One process needs none.
        message_bytes: Size of what each process sends to another at once.
        shares_memory: Whether processes on one host share memory.

    Attributes:
        roots: The nodes of every process, whose values it sends.
        bytes_sent: The bytes of all messages of this process so far, and of what it has written to
            shared memory.
        flushes: Whether additions of this thread return zero for subnormal numbers.
    """

    def __init__(
        self,
        blocks: Blocks,
        process: int,
        group: Any = None,
        *,
        message_bytes: int = MESSAGE_BYTES,
        shares_memory: bool = True,
    ) -> None:
        self.blocks = blocks
        self.process = process
        self.roots = list_roots(blocks)
        self._nodes = [node for nodes in self.roots for node in nodes]
        self.bytes_sent = 0
        self._message_bytes = message_bytes
        self._shares_memory = shares_memory
        self._memory: SharedMemory | None = None
        self.group: Any = None
        if blocks.processes > 1:
            self.group = distributed.group.WORLD if group is None else group
            assert self.group is not None, "torch.distributed is not initialized"
            place = self.group.size(), self.group.rank()
            assert place == (blocks.processes, process), "it is not a group of all processes"
        self.restart()

    def restart(self) -> None:
        """Forget the sums that were started, when Gloo does not use their memory any more."""
        self.close()
        self._is_asked = not self._shares_memory  # whether the processes have tried
        # Processes must agree on this flag of the processor, which changes bits.
        self.flushes = torch.tensor([2.0**-149]).add(0.0).item() == 0.0

    @property
    def sends_leaves(self) -> bool:
        """Whether every root is a leaf, so that half types can travel as they are."""
        return self.blocks.processes == self.blocks.logical_ranks

    def start(self, roots: Sequence[Tensor], result: Tensor, divisor: int = 1) -> "LocalSum":
        """Start to write the sum of all processes' roots, divided by a number, to ``result``.

        Sums must be finished in the order in which they were started.

        Args:
            roots: The values of this process's roots: flat, contiguous, of one dtype and length.
                They are scratch from now on.
            result: Flat, contiguous, of the same length. It may be the last root itself.
            divisor: Divides the sum, once.
        """
        assert len(roots) == len(self.roots[self.process])
        kind = LocalSum
        if self.blocks.processes > 1 and result.device.type != "cpu":
            kind = CollectiveSum
        elif self.blocks.processes > 1:
            kind = MessageSum if self.memory is None else SharedSum
        return kind(self, roots, result, divisor)

    def close(self) -> None:
        """Release memory."""
        if self._memory is not None:
            self._memory.disconnect()
            self._memory = None

    @property
    def memory(self) -> SharedMemory | None:
        """The memory that all processes share; None unless they are on one host."""
        if not self._is_asked:
            self._is_asked = True
            slot_bytes = min(self._message_bytes, SLOT_BYTES)
            self._memory = open_shared_memory(
                self.process, self.blocks.processes, self.group, slot_bytes
            )
        return self._memory

    def chunks(self, result: Tensor) -> list[slice]:
        """Return the parts of a result, of nearly equal size."""
        length, processes = len(result), self.blocks.processes
        count = math.ceil(result.nbytes / (self._message_bytes * processes))
        size = round_up(-(-length // max(1, count)), STEP * processes)
        return [slice(start, min(start + size, length)) for start in range(0, length, size)]

    def shards(self, chunk: slice) -> list[slice]:
        """Return the part of a chunk that each process folds; the last ones may be empty."""
        size = round_up(-(-(chunk.stop - chunk.start) // self.blocks.processes), STEP)
        starts = range(chunk.start, chunk.start + size * self.blocks.processes, size)
        return [slice(min(s, chunk.stop), min(s + size, chunk.stop)) for s in starts]

    @property
    def peers(self) -> Iterator[int]:
        """The other processes, beginning with the next one, so that not all send to one at once."""
        count = self.blocks.processes
        for distance in range(1, count):
            yield (self.process + distance) % count

    def fold(self, values: Sequence[Sequence[Tensor]], result: Tensor, divisor: int) -> None:
        """Write the divided sum of all processes' values to the result; values are scratch."""
        tensors = [each for part in values for each in part]
        for *parts, out in zip(*map(split_in_chunks, (*tensors, result)), strict=True):
            self._fold_chunk(parts, out, divisor)

    def _fold_chunk(self, values: Sequence[Tensor], result: Tensor, divisor: int) -> None:
        additions = len(self._nodes) - 1

        def add(left: Tensor, right: Tensor) -> Tensor:
            nonlocal additions
            additions -= 1
            return add_wide(left, right, None if additions else result)

        fold = Fold[Tensor](self.blocks.logical_ranks, add)
        for node, value in zip(self._nodes, values, strict=True):
            fold.push(node, value)
        ((_, total),) = fold.held
        if is_half(total):
            total = total.float()
        end_sum(total, divisor, result)


def end_sum(total: Tensor, divisor: int, result: Tensor | None = None) -> None:
    """Divide a sum in place, and write it to a result if there is one.

    Every NaN is replaced by torch's: an addition of two NaNs, or a copy, returns any.
    """
    if divisor & (divisor - 1):
        total.div_(divisor)
    elif divisor != 1:  # the same bits, as the reciprocal is exact, and a product takes less time
        total.mul_(1.0 / divisor)
    if result is not None:
        if total.data_ptr() != result.data_ptr() or total.dtype != result.dtype:
            result.copy_(total)  # the only rounding of a half type
        total = result
    # One NaN makes the sum NaN. A sum is only read, a mask is written, and NaNs are rare.
    if total.device.type != "cpu" or not math.isfinite(total.sum().item()):
        total.masked_fill_(total.isnan(), math.nan)


def round_up(number: int, step: int) -> int:
    """Return the smallest multiple of a step that is not less than a number."""
    return -(-number // step) * step


@dataclass(eq=False)
class LocalSum:
    """A sum that has been started, see `RootExchange.start`; this one of the only process."""

    exchange: RootExchange
    roots: Sequence[Tensor]
    result: Tensor
    divisor: int

    def __post_init__(self) -> None:
        """Start to send the roots."""

    def fold(self) -> None:
        """Sum what others wait for, before any sum is finished; only messages are."""

    def finish(self) -> None:
        """Write the result."""
        self._fold([self.roots], self.result)

    def _fold(self, values: Sequence[Sequence[Tensor]], result: Tensor) -> None:
        self.exchange.fold(values, result, self.divisor)


class MessageSum(LocalSum):
    """The sum of CPUs that share no memory: messages travel while backward passes and folds run.

    A process receives the roots of its shards from the others, and sends them its roots of theirs.
    When the sum is finished it folds its shards, sends the results to all, and receives those of
    the others in their places: who sends a result has received all roots of that place.
    """

    def __post_init__(self) -> None:
        self._group = self.exchange.group
        self._works: list[Any] = []
        chunks = self.exchange.chunks(self.result)
        self._chunks = [self.exchange.shards(chunk) for chunk in chunks]
        self._received = [self._start(shards) for shards in self._chunks]

    def fold(self) -> None:
        """Sum this process's shards."""
        for shards, received in zip(self._chunks, self._received, strict=True):
            self._sum(shards, received)
        self._chunks.clear()
        self._received.clear()

    def finish(self) -> None:
        """Wait for the results of the others."""
        self.fold()
        for work in self._works:
            work.wait()

    def _start(self, shards: list[slice]) -> dict[int, tuple[list[Tensor], list[Any]]]:
        """Send the roots of a chunk; return where those of each process arrive, and what waits."""
        received = {}
        mine = shards[self.exchange.process]
        for peer in self.exchange.peers:
            count = len(self.exchange.roots[peer])
            values = self.roots[0].new_empty(count, mine.stop - mine.start).unbind()
            works = [self._group.recv([each], peer, _ROOTS) for each in values if len(each)]
            received[peer] = [*values], works
            for root in self.roots:
                self._send(root[shards[peer]], peer, _ROOTS)
        return received

    def _send(self, values: Tensor, peer: int, tag: int) -> None:
        if len(values):
            self._works.append(self._group.send([values], peer, tag))
            self.exchange.bytes_sent += values.nbytes

    def _sum(
        self, shards: list[slice], received: dict[int, tuple[list[Tensor], list[Any]]]
    ) -> None:
        """Fold this process's shard of a chunk; send it, and receive those of the others."""
        exchange = self.exchange
        for peer in exchange.peers:
            if len(result := self.result[shards[peer]]):
                self._works.append(self._group.recv([result], peer, _RESULTS))
        mine = shards[exchange.process]
        if mine.start == mine.stop:
            return
        for _, works in received.values():
            for work in works:
                work.wait()
        own = [root[mine] for root in self.roots]
        values = [
            received[process][0] if process in received else own
            for process in range(exchange.blocks.processes)
        ]
        self._fold(values, self.result[mine])
        for peer in exchange.peers:
            self._send(self.result[mine], peer, _RESULTS)


class CollectiveSum(LocalSum):
    """The sum of devices: an all-to-all of shards, the fold of one's own, and an all-gather.

    The first collective starts with the sum; the order of the stream is that of all processes.
    """

    def __post_init__(self) -> None:
        exchange, roots = self.exchange, self.roots
        processes, length = exchange.blocks.processes, len(self.result)
        self._size = size = round_up(-(-length // processes), STEP)
        sent = roots[0]
        if len(roots) > 1 or length < size * processes:
            sent = sent.new_empty(len(roots) * size * processes)
            rows = sent.view(processes, len(roots), size)
            for index, root in enumerate(roots):
                for row, part in zip(rows, root.split(size), strict=False):
                    row[index, : len(part)] = part
        self._counts = [len(nodes) * size for nodes in exchange.roots]
        # What is sent is kept until it has arrived.
        self._sent, self._received = sent, sent.new_empty(sum(self._counts))
        exchange.bytes_sent += len(roots) * size * (processes - 1) * sent.element_size()
        counts = [len(roots) * size] * processes
        self._work = exchange.group.alltoall_base(self._received, sent, self._counts, counts)

    def finish(self) -> None:
        """Fold this process's shard, and gather the results."""
        exchange, result, size = self.exchange, self.result, self._size
        self._work.wait()
        parts = self._received.split(self._counts)
        mine = result.new_empty(size)
        self._fold([list(part.view(-1, size).unbind()) for part in parts], mine)
        gathered = result.new_empty(size * exchange.blocks.processes)
        exchange.bytes_sent += mine.nbytes * (exchange.blocks.processes - 1)
        exchange.group.allgather([list(gathered.split(size))], [mine]).wait()
        result.copy_(gathered[: len(result)])


class SharedSum(LocalSum):
    """The sum whose shards each process folds from memory that all processes share.

    The processes meet once for each chunk, and once more. Before they meet, each has packed one
    chunk, folded its shard of the chunk before, and collected the shards of the one before that.
    The sums must be finished in the order in which they were started.
    """

    def __post_init__(self) -> None:
        exchange = self.exchange
        assert exchange.memory is not None
        self._memory = exchange.memory
        self._dtype = self.roots[0].dtype
        most = max(map(len, exchange.roots))
        step = STEP * exchange.blocks.processes
        room = self._memory.slot_bytes // (most * self._dtype.itemsize) // step * step
        length = len(self.result)
        size = round_up(-(-length // -(-length // room)), step)
        self._chunks = [slice(i, min(i + size, length)) for i in range(0, length, size)]
        self._first = self._memory.taken
        self._memory.taken += len(self._chunks)

    def finish(self) -> None:
        """Sum the chunks."""
        last = len(self._chunks) - 1
        for index in range(last + 2):
            if index <= last:
                self._pack(index)
            if index >= 1:
                self._fold_shard(index - 1)
            if index >= 2:  # noqa: PLR2004 - the chunk before the one before
                self._collect(index - 2)
            self._memory.meet()
        self._collect(last)

    def _pack(self, index: int) -> None:
        """Write this process's roots, but not its shard, where the others read them."""
        chunk = self._chunks[index]
        mine = self.exchange.shards(chunk)[self.exchange.process]
        rows = self._view(self.exchange.process, index)
        for row, root in zip(rows, self.roots, strict=True):
            for part in (slice(chunk.start, mine.start), slice(mine.stop, chunk.stop)):
                row[part.start - chunk.start : part.stop - chunk.start] = root[part]
                self.exchange.bytes_sent += (part.stop - part.start) * root.element_size()

    def _fold_shard(self, index: int) -> None:
        """Fold the roots of all processes, and write the result where the others read it."""
        chunk, me = self._chunks[index], self.exchange.process
        mine = self.exchange.shards(chunk)[me]
        if mine.start == mine.stop:
            return
        place = slice(mine.start - chunk.start, mine.stop - chunk.start)
        values = [
            [root[mine] for root in self.roots]
            if process == me
            else list(self._view(process, index)[:, place].unbind())
            for process in range(self.exchange.blocks.processes)
        ]
        result = self.result[mine]
        self._fold(values, result)
        self._find_result(me, index, mine).copy_(result)
        self.exchange.bytes_sent += result.nbytes

    def _collect(self, index: int) -> None:
        """Read the results of the others."""
        shards = self.exchange.shards(self._chunks[index])
        for peer in self.exchange.peers:
            shard = shards[peer]
            self.result[shard] = self._find_result(peer, index, shard)

    def _view(self, process: int, index: int) -> Tensor:
        """Return the roots of a process, one in each row."""
        chunk, count = self._chunks[index], len(self.exchange.roots[process])
        slot = self._memory.slot(process, self._first + index, self._dtype)
        size = chunk.stop - chunk.start
        return slot[: count * size].view(count, size)

    def _find_result(self, process: int, index: int, shard: slice) -> Tensor:
        """Return the place of a result: where its process would pack the shard for itself."""
        start = (shard.start - self._chunks[index].start) * self._dtype.itemsize
        slot = self._memory.slot(process, self._first + index, self.result.dtype)
        start //= self.result.element_size()
        return slot[start : start + shard.stop - shard.start]
