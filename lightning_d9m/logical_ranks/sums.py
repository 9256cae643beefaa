"""Sums of the roots of all processes that were started; `shared_memory` has one more."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from lightning_d9m.logical_ranks.exchange import RootExchange

MESSAGE_BYTES = 2**22  # 4 MiB: smaller ones cost more messages, larger ones more memory
STEP = 16  # shards begin at multiples of 64 bytes of float32


class LocalSum:
    """The sum of the only process."""

    def __init__(self, roots: Sequence[Tensor], result: Tensor, fold: Any) -> None:
        self._work = (roots, result, fold)

    def finish(self) -> None:
        """Fold the roots."""
        roots, result, fold = self._work
        fold([roots], result)


class CollectiveSum:
    """The sum of chunks: an all-to-all of shards, the fold of one's own, and an all-gather.

    On a CPU all of it is done when the sum is finished. On a device the first collective starts
    with the sum, and the order of the stream is that of all processes.
    """

    def __init__(
        self, exchange: "RootExchange", roots: Sequence[Tensor], result: Tensor, fold: Any
    ) -> None:
        self._exchange = exchange
        self._roots = roots
        self._result = result
        self._fold = fold
        self._chunks = exchange.chunks(result)
        self._begun: list[tuple[Any, Tensor, list[Tensor], list[int], int]] = []
        if result.device.type != "cpu":
            self._begin(self._chunks[0])

    def finish(self) -> None:
        """Sum the chunks; the parts of the next one travel while one is folded."""
        for index, chunk in enumerate(self._chunks):
            for following in self._chunks[len(self._begun) : index + 2]:
                self._begin(following)
            self._end(chunk, *self._begun[index])
        self._begun.clear()

    def _begin(self, chunk: slice) -> None:
        """Send each process its shard of a chunk of this process's roots."""
        exchange, roots = self._exchange, self._roots
        processes = exchange.blocks.processes
        length = chunk.stop - chunk.start
        size = round_up(-(-length // processes), STEP)
        sent, packed = roots[0][chunk], []
        if len(roots) > 1 or length < size * processes:
            sent = exchange.take_scratch(sent, len(roots) * size * processes)
            packed = [sent]
            rows = sent.view(processes, len(roots), size)
            for index, root in enumerate(roots):
                for row, part in zip(rows, root[chunk].split(size), strict=False):
                    row[index, : len(part)] = part
        counts = [len(nodes) * size for nodes in exchange.roots]
        received = exchange.take_scratch(sent, sum(counts))
        exchange.bytes_sent += len(roots) * size * (processes - 1) * sent.element_size()
        work = exchange.group.alltoall_base(received, sent, counts, [len(roots) * size] * processes)
        self._begun.append((work, received, packed, counts, size))

    def _end(
        self,
        chunk: slice,
        work: Any,
        received: Tensor,
        packed: list[Tensor],
        counts: list[int],
        size: int,
    ) -> None:
        """Fold this process's shard of a chunk, and gather the results."""
        exchange, result = self._exchange, self._result
        processes = exchange.blocks.processes
        work.wait()
        values = [list(part.view(-1, size).unbind()) for part in received.split(counts)]
        mine = exchange.take_scratch(result, size)
        self._fold(values, mine)
        gathered = exchange.take_scratch(result, size * processes)
        exchange.bytes_sent += mine.nbytes * (processes - 1)
        exchange.group.allgather([list(gathered.chunk(processes))], [mine]).wait()
        result[chunk] = gathered[: chunk.stop - chunk.start]
        for each in (mine, gathered, received, *packed):
            exchange.keep_scratch(each)


def round_up(number: int, step: int) -> int:
    """Return the smallest multiple of a step that is not less than a number."""
    return -(-number // step) * step
