"""The sum of the roots that all processes hold, by any of three exchanges with the same bits.

- ``"gather"``: one all-gather of the roots, and each process folds all of them.
- ``"shards"``: process ``q`` folds the ``q``-th part of each chunk and sends the result to all.
  With one root for each process this sends as many bytes as a ring all-reduce. While one chunk is
  folded, the next ones travel.
- ``"collectives"``: the same as ``"shards"``, by one all-to-all and one all-gather, for transports
  whose messages between two processes must not wait for each other (NCCL).

The tree alone decides the order of every addition, so the choice of the exchange, of chunks and of
shards changes no bit. There is one exception: which of two NaNs an addition returns is up to the
processor. Therefore every NaN of a result is replaced by torch's ``nan``.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, distributed

from lightning_d9m.errors import SettingError
from lightning_d9m.logical_ranks.accumulation import add_wide, is_half
from lightning_d9m.logical_ranks.background import BackgroundThread
from lightning_d9m.logical_ranks.blocks import Blocks
from lightning_d9m.logical_ranks.tree import Node, find_parent, list_roots

Algorithm = Literal["gather", "shards", "collectives"]
CHUNK_BYTES = 2**22  # 4 MiB: smaller ones cost more messages, larger ones overlap less
# Up to this size the second phase of "shards" costs more than the additional bytes of "gather".
_GATHER_BYTES = 2**16
_PAIR_GATHER_BYTES = 2**20
_WINDOW = 3  # chunks whose parts may be on their way to a process
# Shards begin at multiples of 64 bytes of float32.
_STEP = 16
_FIRST_TAG = 2**20  # others use small tags
_TAGS = 2**24


class PendingSum(Protocol):
    """A sum that was started."""

    def finish(self) -> None:
        """Wait for the sum; afterwards the result is complete on this process."""
        ...


class RootExchange:
    """Sums the roots of all processes.

    All processes must start the same sums in the same order, and finish them in that order.

    Args:
        blocks: The logical ranks of all processes.
        process: This process.
        group: The process group of torch.distributed whose ranks are the processes; None is the
            default group. One process needs none.
        algorithm: None chooses by size and device.
        chunk_bytes: Size of the parts that overlap.

    Attributes:
        roots: The nodes of every process, whose values it sends.
        bytes_sent: The bytes of all messages of this process so far.

    Raises:
        SettingError: The group has another number of processes.
    """

    def __init__(
        self,
        blocks: Blocks,
        process: int,
        group: Any = None,
        *,
        algorithm: Algorithm | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self.blocks = blocks
        self.process = process
        self.roots = list_roots(blocks)
        self.bytes_sent = 0
        self._algorithm = algorithm
        self._chunk_bytes = chunk_bytes
        self._next_tag = 0
        self._scratch: dict[tuple[torch.dtype, int], list[Tensor]] = {}
        self._thread: BackgroundThread | None = None
        self.group: Any = None
        if blocks.processes > 1:
            self.group = distributed.group.WORLD if group is None else group
            _check_group(self.group, blocks, process)

    @property
    def sends_leaves(self) -> bool:
        """Whether every root is a leaf, so that half types can travel as they are."""
        return self.blocks.processes == self.blocks.logical_ranks

    def start(self, roots: Sequence[Tensor], result: Tensor, divisor: int = 1) -> PendingSum:
        """Start to write the sum of all processes' roots, divided by a number, to ``result``.

        Args:
            roots: The values of this process's roots: flat, contiguous, of one dtype and length.
                They are scratch from now on.
            result: Flat, contiguous, of the same length. It may be the last root itself.
            divisor: Divides the sum, once.
        """
        assert len(roots) == len(self.roots[self.process])
        fold = partial(self._fold, divisor=divisor)
        if self.blocks.processes == 1:
            return _LocalSum(roots, result, fold)
        algorithm = self._algorithm or self._choose(result)
        if algorithm == "collectives":
            return _CollectiveSum(self, roots, result, fold)
        kind = _GatheredSum if algorithm == "gather" else _ShardedSum
        return kind(self, roots, result, fold)

    def finish_in_background(self, pending: PendingSum) -> Callable[[], None]:
        """Finish a sum on a thread, if messages need no common order; return what waits for it."""
        if not isinstance(pending, _ShardedSum):
            return pending.finish
        if self._thread is None:
            self._thread = BackgroundThread()
        return self._thread.submit(pending.finish).wait

    def close(self) -> None:
        """Let the thread end, and release memory."""
        self._scratch.clear()
        if self._thread is not None:
            self._thread.close()
            self._thread = None

    def _choose(self, result: Tensor) -> Algorithm:
        if result.device.type != "cpu":
            return "collectives"
        # Two processes send as many bytes either way, but "gather" adds everything twice.
        limit = _PAIR_GATHER_BYTES if self.blocks.processes == 2 else _GATHER_BYTES  # noqa: PLR2004
        return "gather" if result.nbytes <= limit else "shards"

    def chunks(self, result: Tensor) -> list[slice]:
        """Return the parts of a result, of nearly equal size."""
        length = len(result)
        count = max(1, math.ceil(length * result.element_size() / self._chunk_bytes))
        size = _round_up(math.ceil(length / count), _STEP * self.blocks.processes)
        return [slice(start, min(start + size, length)) for start in range(0, length, size)]

    def shards(self, chunk: slice) -> list[slice]:
        """Return the part of a chunk that each process folds; the last ones may be empty."""
        size = _round_up(math.ceil((chunk.stop - chunk.start) / self.blocks.processes), _STEP)
        starts = range(chunk.start, chunk.start + size * self.blocks.processes, size)
        return [slice(min(s, chunk.stop), min(s + size, chunk.stop)) for s in starts]

    @property
    def peers(self) -> Iterator[int]:
        """The other processes, beginning with the next one, so that not all send to one at once."""
        count = self.blocks.processes
        for distance in range(1, count):
            yield (self.process + distance) % count

    def take_tags(self, count: int) -> int:
        """Return the first of so many tags, the same on every process."""
        first, self._next_tag = self._next_tag, (self._next_tag + count) % _TAGS
        return _FIRST_TAG + first

    def take_scratch(self, like: Tensor, length: int) -> Tensor:
        """Return memory that an earlier sum has used, because fresh memory costs page faults."""
        kept = self._scratch.get((like.dtype, length))
        return kept.pop() if kept else like.new_empty(length)

    def keep_scratch(self, scratch: Tensor) -> None:
        """Let a later sum use memory."""
        self._scratch.setdefault((scratch.dtype, len(scratch)), []).append(scratch)

    def send(self, tensor: Tensor, peer: int, tag: int) -> Any:
        """Start to send a tensor that nobody changes until it has arrived."""
        self.bytes_sent += tensor.nbytes
        return self.group.send([tensor], peer, tag)

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Any:
        """Start to overwrite a tensor with one that a peer sends."""
        return self.group.recv([tensor], peer, tag)

    def _fold(self, values: Sequence[Sequence[Tensor]], result: Tensor, divisor: int) -> None:
        """Write the divided sum of all processes' values to the result; values are scratch."""
        leaves = self.blocks.logical_ranks
        stack: list[tuple[Node, Tensor]] = []
        for nodes, tensors in zip(self.roots, values, strict=True):
            for node, tensor in zip(nodes, tensors, strict=True):
                value = tensor
                while stack and (parent := find_parent(stack[-1][0], node, leaves)):
                    is_last = parent == (0, leaves)
                    value = add_wide(stack.pop()[1], value, result if is_last else None)
                    node = parent  # noqa: PLW2901 - the climb
                stack.append((node, value))
        ((_, total),) = stack
        if divisor != 1:
            total = (total.float() if is_half(total) else total).div_(divisor)
        if total.data_ptr() != result.data_ptr() or total.dtype != result.dtype:
            result.copy_(total)  # the only rounding of a half type
        replace_nans(result)


def replace_nans(tensor: Tensor) -> None:
    """Replace every NaN by torch's: an addition of two NaNs returns either of them."""
    # One NaN makes the sum NaN. A sum is only read, a mask is written, and NaNs are rare.
    if tensor.device.type != "cpu" or not math.isfinite(tensor.sum().item()):
        tensor.masked_fill_(tensor.isnan(), math.nan)


class _LocalSum:
    """The sum of the only process."""

    def __init__(self, roots: Sequence[Tensor], result: Tensor, fold: Any) -> None:
        self._work = (roots, result, fold)

    def finish(self) -> None:
        roots, result, fold = self._work
        size = CHUNK_BYTES // result.element_size()  # a chunk stays in the cache
        for start in range(0, len(result), size):
            part = slice(start, start + size)
            fold([[root[part] for root in roots]], result[part])


class _ShardedSum:
    """Each process folds its shard of each chunk and sends the result to all."""

    def __init__(
        self, exchange: RootExchange, roots: Sequence[Tensor], result: Tensor, fold: Any
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
        count = sum(map(len, exchange.roots)) - len(roots)
        longest = max(s[exchange.process].stop - s[exchange.process].start for s in self._chunks)
        window = min(_WINDOW, len(self._chunks))
        self._memory = exchange.take_scratch(roots[0], window * count * longest)
        self._scratch = self._memory.view(window, count, longest)
        for index, shards in enumerate(self._chunks):
            for peer in exchange.peers:
                for root in roots:
                    self._send(root[shards[peer]], peer, index)
        for index in range(min(_WINDOW, len(self._chunks))):
            self._expect(index)

    def _send(self, tensor: Tensor, peer: int, index: int) -> None:
        if len(tensor):
            self._sent.append(self._exchange.send(tensor, peer, self._tag + 2 * index))

    def _expect(self, index: int) -> None:
        """Receive this process's shard of a chunk from all peers, and the results of theirs."""
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

    def finish(self) -> None:
        exchange, results = self._exchange, []
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
                    results.append(exchange.receive(theirs, peer, tag))
                if len(mine):
                    self._sent.append(exchange.send(mine, peer, tag))
            if index + _WINDOW < len(self._chunks):
                self._expect(index + _WINDOW)
        for work in (*results, *self._sent):
            work.wait()
        exchange.keep_scratch(self._memory)


class _GatheredSum:
    """Each process sends its roots to all, and each folds all of them."""

    def __init__(
        self, exchange: RootExchange, roots: Sequence[Tensor], result: Tensor, fold: Any
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

    def finish(self) -> None:
        self._work.wait()
        self._fold(self._values, self._result)
        self._exchange.keep_scratch(self._received)


class _CollectiveSum:
    """The exchange of shards by an all-to-all and an all-gather."""

    def __init__(
        self, exchange: RootExchange, roots: Sequence[Tensor], result: Tensor, fold: Any
    ) -> None:
        self._exchange = exchange
        self._result = result
        self._fold = fold
        processes = exchange.blocks.processes
        self._size = size = _round_up(math.ceil(len(result) / processes), _STEP)
        length = size * processes
        padded = roots[0].new_zeros(processes, len(roots), size)
        for index, root in enumerate(roots):
            whole = (
                root
                if len(root) == length
                else torch.nn.functional.pad(root, (0, length - len(root)))
            )
            padded[:, index] = whole.view(processes, size)
        counts = [len(nodes) * size for nodes in exchange.roots]
        self._received = roots[0].new_empty(sum(counts))
        self._counts = counts
        sent = padded.view(-1)
        exchange.bytes_sent += len(roots) * size * (processes - 1) * sent.element_size()
        self._work = exchange.group.alltoall_base(
            self._received, sent, counts, [len(roots) * size] * processes
        )
        self._sent = sent  # until it has arrived

    def finish(self) -> None:
        exchange, result, size = self._exchange, self._result, self._size
        processes = exchange.blocks.processes
        self._work.wait()
        values = [list(part.view(-1, size).unbind()) for part in self._received.split(self._counts)]
        mine = result.new_empty(size)
        self._fold(values, mine)
        gathered = result.new_empty(size * processes)
        exchange.bytes_sent += mine.nbytes * (processes - 1)
        exchange.group.allgather([list(gathered.chunk(processes))], [mine]).wait()
        result.copy_(gathered[: len(result)])


def _check_group(group: Any, blocks: Blocks, process: int) -> None:
    if group is None:
        raise SettingError(
            f"{blocks.processes} processes need a process group, and torch.distributed is not "
            "initialized: call torch.distributed.init_process_group first, or pass group."
        )
    if group.size() != blocks.processes or group.rank() != process:
        raise SettingError(
            f"This is process {process} of {blocks.processes}, but rank {group.rank()} of "
            f"{group.size()} in the process group: pass a group of all processes, in order."
        )


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
