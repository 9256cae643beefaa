"""Sums of the roots of all processes that were started, one class for each way of exchange."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from lightning_d9m.logical_ranks.accumulation import split_in_chunks

if TYPE_CHECKING:
    from lightning_d9m.logical_ranks.exchange import RootExchange

MESSAGE_BYTES = 2**22  # 4 MiB: smaller ones cost more messages, larger ones overlap less
STEP = 16  # shards begin at multiples of 64 bytes of float32
_WINDOW = 3  # chunks whose parts may be on their way to a process


class PendingSum(Protocol):
    """A sum that was started."""

    def fold(self) -> None:
        """Do what needs no other thread than one; `finish` does it otherwise."""
        ...

    def finish(self) -> None:
        """Wait for the sum; afterwards the result is complete on this process."""
        ...


class LocalSum:
    """The sum of the only process."""

    def __init__(self, roots: Sequence[Tensor], result: Tensor, fold: Any) -> None:
        self._work = (roots, result, fold)

    def fold(self) -> None:
        """Wait for `finish`."""

    def finish(self) -> None:
        """Fold the roots."""
        roots, result, fold = self._work
        fold([roots], result)


class PairSum:
    """The sum of two processes with one root each, by an all-reduce: it has one order.

    Torch's threads send and add, so it takes less time than a `ShardedSum`.
    """

    def __init__(
        self, exchange: "RootExchange", roots: Sequence[Tensor], result: Tensor, divide: Any
    ) -> None:
        if roots[0].data_ptr() != result.data_ptr():
            result.copy_(roots[0])
        self._result, self._divide = result, divide
        exchange.bytes_sent += result.nbytes
        self._work = exchange.group.allreduce([result])

    def fold(self) -> None:
        """Wait for the sum, and divide it."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            for chunk in split_in_chunks(self._result):
                self._divide(chunk)

    def finish(self) -> None:
        """Wait for the sum, and divide it."""
        self.fold()


class ShardedSum:
    """Each process folds its shard of each chunk and sends the result to all."""

    def __init__(
        self, exchange: "RootExchange", roots: Sequence[Tensor], result: Tensor, fold: Any
    ) -> None:
        self._exchange = exchange
        self._roots = roots
        self._result = result
        self._fold = fold
        self._chunks = [exchange.shards(chunk) for chunk in exchange.chunks(result)]
        self._tag = exchange.take_tags(2 * len(self._chunks))
        self._sent: list[Any] = []
        self._arriving: dict[int, list[Any]] = {}
        self._values: dict[int, list[list[Tensor]]] = {}
        self._results: list[Any] = []
        self._memory: Tensor | None = None
        self._is_folded = False
        for index, shards in enumerate(self._chunks):
            for peer in exchange.peers:
                for root in roots:
                    self._send(root[shards[peer]], peer, index)
        # Several sums may be on their way; the memory for what arrives stays that of a few.
        if len(exchange.receiving) < _WINDOW:
            self._begin()

    def _begin(self) -> None:
        """Expect the first chunks."""
        exchange, roots = self._exchange, self._roots
        exchange.receiving.add(self)
        count = sum(map(len, exchange.roots)) - len(roots)
        longest = max(s[exchange.process].stop - s[exchange.process].start for s in self._chunks)
        window = min(_WINDOW, len(self._chunks))
        self._memory = exchange.take_scratch(roots[0], window * count * longest)
        self._scratch = self._memory.view(window, count, longest)
        for index in range(window):
            self._expect(index)

    def _send(self, tensor: Tensor, peer: int, index: int) -> None:
        if len(tensor):
            self._sent.append(self._exchange.send(tensor, peer, self._tag + 2 * index))

    def _expect(self, index: int) -> None:
        """Receive this process's shard of a chunk from all peers."""
        exchange, shards = self._exchange, self._chunks[index]
        mine = shards[exchange.process]
        length = mine.stop - mine.start
        values = [[root[mine] for root in self._roots] for _ in exchange.roots]
        works = []
        rows = self._scratch[index % _WINDOW, :, :length]
        first = 0
        for peer in exchange.peers:
            count = len(exchange.roots[peer])
            values[peer] = list(rows[first : first + count].unbind())
            first += count
            if length:
                tag = self._tag + 2 * index
                works += [exchange.receive(value, peer, tag) for value in values[peer]]
        self._values[index], self._arriving[index] = values, works

    def fold(self) -> None:
        """Fold this process's shards, and start to exchange the results."""
        if self._is_folded:
            return
        self._is_folded = True
        exchange = self._exchange
        if self._memory is None:
            self._begin()
        for index, shards in enumerate(self._chunks):
            for work in self._arriving.pop(index):
                work.wait()
            mine = self._result[shards[exchange.process]]
            values = self._values.pop(index)
            if len(mine):
                self._fold(values, mine)
            tag = self._tag + 2 * index + 1
            for peer in exchange.peers:
                # The peer sends its result after it has received this process's part, so the
                # result may be the memory that the part was sent from.
                theirs = self._result[shards[peer]]
                if len(theirs):
                    self._results.append(exchange.receive(theirs, peer, tag))
                if len(mine):
                    self._sent.append(exchange.send(mine, peer, tag))
            if index + _WINDOW < len(self._chunks):
                self._expect(index + _WINDOW)
        assert self._memory is not None
        exchange.keep_scratch(self._memory)
        exchange.receiving.discard(self)

    def finish(self) -> None:
        """Wait for all results."""
        self.fold()
        for work in (*self._results, *self._sent):
            work.wait()


class GatheredSum:
    """Each process sends its roots to all, and each folds all of them."""

    def __init__(
        self, exchange: "RootExchange", roots: Sequence[Tensor], result: Tensor, fold: Any
    ) -> None:
        self._result, self._fold = result, fold
        counts = [len(nodes) for nodes in exchange.roots]
        most, length = max(counts), len(roots[0])
        sent = roots[0] if most == 1 else roots[0].new_zeros(most * length)
        if most > 1:
            torch.cat(list(roots), out=sent[: len(roots) * length])
        self._received = exchange.take_scratch(roots[0], len(counts) * most * length)
        rows = self._received.chunk(len(counts))
        self._values = [
            list(row[: count * length].view(count, length).unbind())
            for row, count in zip(rows, counts, strict=True)
        ]
        exchange.bytes_sent += sent.nbytes * (len(counts) - 1)
        self._exchange = exchange
        # One message of torch's thread: where processes share cores, Gloo's own thread spins while
        # a thread that sends is preempted.
        self._work = exchange.group.allgather([list(rows)], [sent])

    def fold(self) -> None:
        """Wait for `finish`."""

    def finish(self) -> None:
        """Fold the roots of all processes."""
        self._work.wait()
        self._fold(self._values, self._result)
        self._exchange.keep_scratch(self._received)


class CollectiveSum:
    """The exchange of shards by an all-to-all and an all-gather."""

    def __init__(
        self, exchange: "RootExchange", roots: Sequence[Tensor], result: Tensor, fold: Any
    ) -> None:
        self._exchange = exchange
        self._result = result
        self._fold = fold
        processes = exchange.blocks.processes
        self._size = size = round_up(math.ceil(len(result) / processes), STEP)
        sent = roots[0]
        if len(roots) > 1 or len(sent) < size * processes:
            sent = exchange.take_scratch(sent, len(roots) * size * processes)
            rows = sent.view(processes, len(roots), size)
            for index, root in enumerate(roots):
                for row, part in zip(rows, root.split(size), strict=False):
                    row[index, : len(part)] = part
        counts = [len(nodes) * size for nodes in exchange.roots]
        self._received = exchange.take_scratch(sent, sum(counts))
        # They live until all has arrived.
        self._scratch = [self._received] if sent is roots[0] else [self._received, sent]
        self._counts = counts
        exchange.bytes_sent += len(roots) * size * (processes - 1) * sent.element_size()
        self._work = exchange.group.alltoall_base(
            self._received, sent, counts, [len(roots) * size] * processes
        )

    def fold(self) -> None:
        """Wait for `finish`."""

    def finish(self) -> None:
        """Fold this process's part, and gather the results."""
        exchange, result, size = self._exchange, self._result, self._size
        processes = exchange.blocks.processes
        self._work.wait()
        values = [list(part.view(-1, size).unbind()) for part in self._received.split(self._counts)]
        mine = exchange.take_scratch(result, size)
        self._fold(values, mine)
        gathered = exchange.take_scratch(result, size * processes)
        exchange.bytes_sent += mine.nbytes * (processes - 1)
        exchange.group.allgather([list(gathered.chunk(processes))], [mine]).wait()
        result.copy_(gathered[: len(result)])
        for scratch in (mine, gathered, *self._scratch):
            exchange.keep_scratch(scratch)


def round_up(number: int, step: int) -> int:
    """Return the smallest multiple of a step that is not less than a number."""
    return -(-number // step) * step
