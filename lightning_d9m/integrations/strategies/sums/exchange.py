"""The sum of the roots that all processes hold, by any of three exchanges with the same bits.

The processes of one host write their roots to memory that all of them read: process ``q`` folds the
``q``-th part of each chunk there, and all copy the results. Processes of several hosts do the same
by messages, and devices by two all-to-alls. With one root for each process these send as many bytes
as a ring all-reduce.

The tree alone decides the order of every addition, so the choice of the exchange, of chunks and of
shards changes no bit. There is one exception: which of two NaNs an addition returns is up to the
processor. Therefore every NaN of a result is replaced by torch's ``nan``.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed

from lightning_d9m.integrations.strategies.sums.accumulation import is_half, merge
from lightning_d9m.integrations.strategies.sums.shared_memory import (
    SharedMemory,
    open_shared_memory,
)
from lightning_d9m.integrations.strategies.sums.tree import Blocks, count_merges, find_roots

# A send waits for what is being received, so few messages are fast; small ones overlap more.
MESSAGE_BYTES = 6 * 2**20
# The tags of messages: those of one tag arrive in their order, however long others take.
# Any numbers serve that torch does not use for its own messages in the group, whose tag is 0 by
# default.
_ROOTS, _RESULTS = 0x0D9A, 0x0D9B
STEP = 16  # shards begin at multiples of 64 bytes of float32


class RootExchange:
    """Sums the roots of all processes.

    All processes must start the same sums in the same order, and fold them in that order.

    Args:
        blocks: The logical ranks of all processes.
        process: This process.
        group: The process group of torch.distributed whose ranks are the processes; None is the
            default group. One process needs none.

    Attributes:
        roots: The nodes of every process, whose values it sends.
        bytes_sent: The bytes that this process has sent so far, or written to shared memory.
        memory: What all processes share; None before the first sum, and unless on one host.
        opens_memory: Whether the next sum tries to open that memory.
        flushes: Whether additions of this thread return zero for subnormal numbers.
    """

    def __init__(self, blocks: Blocks, process: int, group: Any = None) -> None:
        self.blocks = blocks
        self.process = process
        leaves = blocks.logical_ranks
        self.roots = [find_roots(blocks.of(each), leaves) for each in range(blocks.processes)]
        stops = [node.stop for nodes in self.roots for node in nodes]
        self._merges = count_merges(0, stops, leaves)
        self.bytes_sent = 0
        self.group: Any = None
        if blocks.processes > 1:
            self.group = distributed.group.WORLD if group is None else group
            assert self.group is not None, "torch.distributed is not initialized"
            place = self.group.size(), self.group.rank()
            assert place == (blocks.processes, process), "it is not a group of all processes"
        # Processes must agree on this flag of the processor, which changes bits.
        self.flushes = torch.tensor([2.0**-149], device="cpu").add(0.0).item() == 0.0
        self.memory: SharedMemory | None = None
        self.opens_memory = True

    def start(self, roots: Sequence[Tensor], result: Tensor, divisor: int = 1) -> "LocalSum":
        """Start to write the sum of all processes' roots, divided by a number, to ``result``.

        Sums must be folded in the order in which they were started, and then finished.

        Args:
            roots: The values of this process's roots: flat, contiguous, of one dtype and length.
                They are scratch from now on.
            result: Flat, contiguous, of the same length. It may be the last root itself.
            divisor: Divides the sum, once.
        """
        assert len(roots) == len(self.roots[self.process])
        kind = LocalSum
        if self.blocks.processes > 1 and result.device.type != "cpu":
            # NCCL does not support tags, by which `MessageSum` tells its messages apart.
            kind = AllToAllSum
        elif self.blocks.processes > 1:
            # Only when it is needed, because opening it is a collective call, and devices need
            # none. If it fails once, it is not tried again.
            if self.opens_memory:
                self.opens_memory = False
                self.memory = open_shared_memory(self.process, self.blocks.processes, self.group)
            # On two cores a step with messages takes 1.0 to 1.5 times the CPU time of DDP's, and
            # with shared memory 0.75 to 0.9 times.
            kind = MessageSum if self.memory is None else SharedSum
        return kind(self, roots, result, divisor)

    def close(self) -> None:
        """Forget the sums that were started, when Gloo does not use their memory any more."""
        if self.memory is not None:
            self.memory.disconnect()
        self.memory, self.opens_memory = None, True

    def chunks(self, length: int, most: int) -> list[slice]:
        """Return parts of a sum, of nearly equal size and of at most so many elements."""
        step = STEP * self.blocks.processes  # so that every shard is aligned
        count = -(-length // (most // step * step))
        size = round_up(-(-length // count), step)
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

    def fold(self, values: Sequence[Tensor], result: Tensor, divisor: int) -> None:
        """Write the divided sum of all processes' roots to the result; the roots are scratch."""
        held: list[Any] = []
        for place, (value, merges) in enumerate(zip(values, self._merges, strict=True), 1):
            held.append(merge(held, value, merges, result if place == len(values) else None))
        # The merges add all roots to one sum, whatever the numbers of logical ranks and of
        # processes.
        (total,) = held
        end_sum(total.float() if is_half(total) else total, divisor, result)


def end_sum(total: Tensor, divisor: int, result: Tensor | None = None) -> None:
    """Divide a sum in place, and write it to a result if there is one.

    Every NaN is replaced by torch's: an addition of two NaNs, or a copy, returns any.
    """
    if divisor != 1:
        total.div_(divisor)
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
    _works: list[Any] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        """Start to send the roots."""

    def fold(self) -> None:
        """Sum the part of this process, which others wait for."""
        self.exchange.fold(self.roots, self.result, self.divisor)

    def finish(self) -> None:
        """Wait for the parts of the others."""
        for work in self._works:
            work.wait()


class MessageSum(LocalSum):
    """The sum of CPUs that share no memory: messages travel while backward passes and folds run.

    A process receives the roots of its shards from the others, and sends them its roots of theirs.
    Then it folds its shards, sends the results to all, and receives those of the others in their
    places: who sends a result has received all roots of that place.
    """

    # `AllToAllSum` gives the same bits, but Gloo's all-to-all of 25 MiB between two processes takes
    # 1.8 times the CPU time of these messages.

    def __post_init__(self) -> None:
        exchange, result = self.exchange, self.result
        most = MESSAGE_BYTES * exchange.blocks.processes // result.element_size()
        # All chunks start at once. Their messages are matched by peer, tag and order, so that no
        # chunk waits for one before it.
        shards = map(exchange.shards, exchange.chunks(len(result), most))
        self._chunks = [(each, *self._start(each)) for each in shards]

    def _start(self, shards: list[slice]) -> tuple[list[Tensor], list[Any]]:
        """Send the roots of a chunk; return all of this process's shard, and what they wait for."""
        exchange, mine = self.exchange, shards[self.exchange.process]
        values = {exchange.process: [root[mine] for root in self.roots]}
        waits: list[Any] = []
        for peer in exchange.peers:
            rows = self.roots[0].new_empty(len(exchange.roots[peer]), mine.stop - mine.start)
            values[peer] = [*rows.unbind()]
            waits += [exchange.group.recv([row], peer, _ROOTS) for row in rows if len(row)]
            for root in self.roots:
                self._send(root[shards[peer]], peer, _ROOTS)
        # In the order of processes, which is that of logical ranks and so of the leaves of the
        # tree.
        return [root for process in sorted(values) for root in values[process]], waits

    def _send(self, values: Tensor, peer: int, tag: int) -> None:
        if len(values):
            self._works.append(self.exchange.group.send([values], peer, tag))
            self.exchange.bytes_sent += values.nbytes

    def fold(self) -> None:
        """Sum this process's shards; send the results, and receive those of the others."""
        exchange = self.exchange
        for shards, values, waits in self._chunks:
            for peer in exchange.peers:
                if len(result := self.result[shards[peer]]):
                    self._works.append(exchange.group.recv([result], peer, _RESULTS))
            # The receives of results are posted before this wait, so that a faster process need not
            # wait for this one.
            for work in waits:
                work.wait()
            mine = self.result[shards[exchange.process]]
            if len(mine):
                exchange.fold(values, mine, self.divisor)
            for peer in exchange.peers:
                self._send(mine, peer, _RESULTS)


class AllToAllSum(LocalSum):
    """The sum of devices by an all-to-all of the roots of all shards, and one of the folded shards.

    The first starts with the sum, so that it runs while backward passes do.
    """

    def __post_init__(self) -> None:
        exchange, roots = self.exchange, self.roots
        shards = exchange.shards(slice(0, len(self.result)))
        self._sizes = [shard.stop - shard.start for shard in shards]
        size = self._sizes[exchange.process]
        self._counts = [len(nodes) * size for nodes in exchange.roots]
        self._received = roots[0].new_empty(sum(self._counts))
        sent = roots[0]
        if len(roots) > 1:
            # An all-to-all sends one contiguous part to each process: all roots of its shard. With
            # one root that is the root itself, and nothing is copied.
            sent = torch.cat([root[shard] for shard in shards for root in roots])
        counts = [len(roots) * each for each in self._sizes]
        self._send(sent, counts, self._received, self._counts)

    def _send(self, sent: Tensor, counts: list[int], received: Tensor, places: list[int]) -> None:
        exchange = self.exchange
        exchange.bytes_sent += (len(sent) - counts[exchange.process]) * sent.element_size()
        self._sent = sent  # until it has arrived
        self._works = [exchange.group.alltoall_base(received, sent, places, counts)]

    def fold(self) -> None:
        """Sum this process's shard, and send it to all."""
        self.finish()  # the roots are here
        exchange = self.exchange
        size, parts = self._sizes[exchange.process], self._received.split(self._counts)
        values = [
            root
            for part, nodes in zip(parts, exchange.roots, strict=True)
            for root in part.view(len(nodes), size).unbind()
        ]
        mine = self.result.new_empty(size)
        exchange.fold(values, mine, self.divisor)
        processes = exchange.blocks.processes
        # An all-gather would need shards of equal size. Those of the last processes may be shorter,
        # or empty.
        self._send(mine.repeat(processes), [size] * processes, self.result, self._sizes)


class SharedSum(LocalSum):
    """The sum whose shards each process folds from memory that all processes share.

    The processes meet once for each chunk, and once more. Before they meet, each has packed one
    chunk, folded its shard of the chunk before, and collected the shards of the one before that.
    """

    def __post_init__(self) -> None:
        exchange = self.exchange
        assert exchange.memory is not None
        self._memory = exchange.memory
        self._dtype = self.roots[0].dtype
        most = max(map(len, exchange.roots))
        room = self._memory.slot_bytes // (most * self._dtype.itemsize)
        self._chunks = exchange.chunks(len(self.result), room)
        # Chunks are numbered across all sums, so that a process that is already in the next sum
        # writes to another slot than one from which others still read.
        self._first = self._memory.taken
        self._memory.taken += len(self._chunks)

    def fold(self) -> None:
        """Sum the chunks."""
        last = len(self._chunks) - 1
        for index in range(last + 2):
            if index <= last:
                self._pack(index)
            if index >= 1:
                self._fold_shard(index - 1)
            if index >= 2:  # noqa: PLR2004 - the chunk before the one before
                self._collect(index - 2)
            # One wait for each chunk: it separates the packing of this chunk from its fold in the
            # next round, and the fold of the one before from its collection.
            self._memory.meet()
        self._collect(last)

    def _pack(self, index: int) -> None:
        """Write this process's roots, but not its shard, where the others read them."""
        chunk = self._chunks[index]
        mine = self.exchange.shards(chunk)[self.exchange.process]
        rows = self._view(self.exchange.process, index)
        for row, root in zip(rows, self.roots, strict=True):
            # This process folds its own shard from its own roots. There is its result later, where
            # others read it.
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
        values: list[Tensor] = []
        for process in range(self.exchange.blocks.processes):
            if process == me:
                values += [root[mine] for root in self.roots]
            else:
                values += self._view(process, index)[:, place].unbind()
        result = self.result[mine]
        self.exchange.fold(values, result, self.divisor)
        self._find_result(me, index, mine).copy_(result)
        self.exchange.bytes_sent += result.nbytes

    def _collect(self, index: int) -> None:
        """Read the results of the others."""
        shards = self.exchange.shards(self._chunks[index])
        for peer in self.exchange.peers:
            self.result[shards[peer]] = self._find_result(peer, index, shards[peer])

    def _view(self, process: int, index: int) -> Tensor:
        """Return the roots of a process, one in each row."""
        chunk, count = self._chunks[index], len(self.exchange.roots[process])
        slot = self._memory.slot(process, self._first + index, self._dtype)
        size = chunk.stop - chunk.start
        return slot[: count * size].view(count, size)

    def _find_result(self, process: int, index: int, shard: slice) -> Tensor:
        """Return the place of a result: where its process would pack the shard for itself."""
        # Roots may be float32 where the result has a half type, so the place is counted in bytes.
        start = (shard.start - self._chunks[index].start) * self._dtype.itemsize
        slot = self._memory.slot(process, self._first + index, self.result.dtype)
        start //= self.result.element_size()
        return slot[start : start + shard.stop - shard.start]
