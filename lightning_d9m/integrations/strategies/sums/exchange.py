"""The sum of the roots that all processes hold, by either of two exchanges with the same bits.

Process ``q`` receives the ``q``-th part of all roots, folds it, and sends the result to all: by
messages, and on devices by two all-to-alls. With one root for each process these send as many bytes
as a ring all-reduce; a small sum on CPUs, whose messages each have all of it, sends more.

The tree alone decides the order of every addition, so the choice of the exchange and of shards
changes no bit. There is one exception: which of two NaNs an addition returns is up to the
processor. Therefore every NaN of a result is replaced by torch's ``nan``.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from lightning_d9m.integrations.strategies.sums.accumulation import add_wide, is_half
from lightning_d9m.integrations.strategies.sums.tree import Blocks, count_merges, find_roots

# The roots of a sum that a process sends whole, if they have at most so many bytes: to fold all of
# it takes less time than to wait for results.
WHOLE_BYTES = 2**20
# The tags of messages: those of one tag arrive in their order, however long others take.
# Any numbers serve that torch does not use for its own messages in the group, whose tag is 0 by
# default.
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

    Attributes:
        roots: The nodes of every process, whose values it sends.
        bytes_sent: The bytes that this process has sent so far.
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
        if self.blocks.processes > 1:
            # NCCL does not support tags, by which `MessageSum` tells its messages apart. Memory
            # that the processes of one host share took 300 lines, and saved a quarter of a step.
            kind = MessageSum if result.device.type == "cpu" else AllToAllSum
        return kind(self, roots, result, divisor)

    def shards(self, length: int) -> list[slice]:
        """Return the part of a sum that each process folds; the last ones may be empty."""
        size = round_up(-(-length // self.blocks.processes), STEP)
        starts = range(0, size * self.blocks.processes, size)
        return [slice(min(s, length), min(s + size, length)) for s in starts]

    @property
    def peers(self) -> Iterator[int]:
        """The other processes, beginning with the next one, so that not all send to one at once."""
        count = self.blocks.processes
        for distance in range(1, count):
            yield (self.process + distance) % count

    def fold(self, values: Sequence[Tensor], result: Tensor, divisor: int) -> None:
        """Write the divided sum of all processes' roots to the result; the roots are scratch."""
        held: list[Tensor] = []
        for place, (value, merges) in enumerate(zip(values, self._merges, strict=True), 1):
            total = value
            for left in range(merges, 0, -1):
                is_last = place == len(values) and left == 1
                total = add_wide(held.pop(), total, result if is_last else None)
            held.append(total)
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

    def __post_init__(self) -> None:
        """Start to send the roots."""

    def fold(self) -> None:
        """Sum what others wait for, before any sum is finished."""

    def finish(self) -> None:
        """Write the result."""
        self.exchange.fold(self.roots, self.result, self.divisor)


class MessageSum(LocalSum):
    """The sum of CPUs that share no memory: messages travel while backward passes and folds run.

    A process receives the roots of its shards from the others, and sends them its roots of theirs.
    When the sum is finished it folds its shards, sends the results to all, and receives those of
    the others in their places: who sends a result has received all roots of that place. Of a small
    sum, each process receives all roots, and folds everything.
    """

    # `AllToAllSum` gives the same bits, but Gloo's all-to-all of 25 MiB between two processes takes
    # 1.8 times the CPU time of these messages.

    def __post_init__(self) -> None:
        """Send the roots, and receive those of this process's shard."""
        self._works: list[Any] = []
        exchange, length = self.exchange, len(self.result)
        self._is_whole = self.result.nbytes * (exchange.blocks.processes - 1) <= WHOLE_BYTES
        whole = [slice(0, length)] * exchange.blocks.processes
        # One message for each root and peer: with several smaller ones a step took as long.
        self._shards = whole if self._is_whole else exchange.shards(length)
        mine = self._shards[exchange.process]
        values = {exchange.process: [root[mine] for root in self.roots]}
        self._waits: list[Any] = []
        for peer in exchange.peers:
            rows = self.roots[0].new_empty(len(exchange.roots[peer]), mine.stop - mine.start)
            values[peer] = [*rows.unbind()]
            self._waits += [exchange.group.recv([row], peer, _ROOTS) for row in rows if len(row)]
            for root in self.roots:
                self._send(root[self._shards[peer]], peer, _ROOTS)
        # In the order of processes, which is that of logical ranks and so of the leaves of the
        # tree.
        self._values = [root for process in sorted(values) for root in values[process]]

    def _send(self, values: Tensor, peer: int, tag: int) -> None:
        if len(values):
            self._works.append(self.exchange.group.send([values], peer, tag))
            self.exchange.bytes_sent += values.nbytes

    def fold(self) -> None:
        """Sum this process's shard; send the result, and receive those of the others."""
        if not self._values:  # `finish` calls this again
            return
        exchange, mine = self.exchange, self.result[self._shards[self.exchange.process]]
        peers = [] if self._is_whole else [*exchange.peers]
        for peer in peers:
            if len(result := self.result[self._shards[peer]]):
                self._works.append(exchange.group.recv([result], peer, _RESULTS))
        # The receives of results are posted before this wait, so that a faster process need not
        # wait for this one.
        for work in self._waits:
            work.wait()
        if self._is_whole:  # what is being sent is scratch from now on
            self._wait()
        if len(mine):
            exchange.fold(self._values, mine, self.divisor)
        for peer in peers:
            self._send(mine, peer, _RESULTS)
        self._values.clear()

    def finish(self) -> None:
        """Wait for the results of the others."""
        self.fold()
        self._wait()

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works.clear()  # Gloo's works can be waited for once


class AllToAllSum(LocalSum):
    """The sum of devices by an all-to-all of the roots of all shards, and one of the folded shards.

    The first starts with the sum, so that it runs while backward passes do.
    """

    def __post_init__(self) -> None:
        exchange, roots = self.exchange, self.roots
        shards = exchange.shards(len(self.result))
        self._sizes = [shard.stop - shard.start for shard in shards]
        size = self._sizes[exchange.process]
        self._counts = [len(nodes) * size for nodes in exchange.roots]
        self._received: Tensor | None = roots[0].new_empty(sum(self._counts))
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
        self._work = exchange.group.alltoall_base(received, sent, places, counts)

    def fold(self) -> None:
        """Sum this process's shard, and send it to all."""
        if self._received is None:
            return
        self._work.wait()
        exchange = self.exchange
        size, parts = self._sizes[exchange.process], self._received.split(self._counts)
        values = [
            root
            for part, nodes in zip(parts, exchange.roots, strict=True)
            for root in part.view(len(nodes), size).unbind()
        ]
        mine = self.result.new_empty(size)
        exchange.fold(values, mine, self.divisor)
        self._received = None
        processes = exchange.blocks.processes
        # An all-gather would need shards of equal size. Those of the last processes may be shorter,
        # or empty.
        self._send(mine.repeat(processes), [size] * processes, self.result, self._sizes)

    def finish(self) -> None:
        """Wait for the results of the others."""
        self.fold()
        self._work.wait()
