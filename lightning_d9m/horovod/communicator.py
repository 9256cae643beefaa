"""Everything that crosses from rank to rank, without spinning or hanging.

Before each exchange the ranks agree on what it is: all reduce one fingerprint, so that a rank in
the backward pass meets a rank at a barrier there, and both can say so.

Sums whose start is agreement enough (all gradients arrived, in buckets that are known to be equal)
need none while they come. A rank that waits for long only asks: it reduces a fingerprint that says
nothing, and does not wait for the answer. The others answer with what they reduce next, whenever
that is. Who has claimed something then claims it again, as does the asker, unless its sum is on the
way: a rank has finished it already.
"""

import hashlib
import math
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from lightning_d9m.errors import RankLostError, RanksDisagreeError
from lightning_d9m.horovod.transports import (
    HorovodTransport,
    Pending,
    TorchTransport,
    Transport,
)

T = TypeVar("T")
# After each, Python handles signals, and a rank asks where the others are.
_SLICE_SECONDS = 0.5
_ASKS = -1  # the fingerprint of a rank that only asks
_LIMIT_OF_NAMES = 8
# Lightning validates in inference mode, whose tensors Horovod's thread may not write to.
_normal_tensors = torch.inference_mode(mode=False)


@dataclass(frozen=True)
class CollectiveIntent:
    """What a rank is about to do.

    Attributes:
        doing: In words, such as ``"the barrier 'pre_setup'"``.
        items: What it does it with, such as the parameters that have gradients.
    """

    doing: str
    items: tuple[str, ...] = ()

    def fingerprint(self) -> int:
        """A number of 62 bits; two different claims have the same by chance only."""
        text = "\0".join((self.doing, *self.items)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 2


class Communicator:
    """The collectives of one run.

    Args:
        hvd: The module ``horovod.torch``, initialised.
        grace: Seconds for which a rank that failed waits for the others to hear why.

    Attributes:
        broken: The error after which no collective can be trusted any more, or None.
    """

    def __init__(self, hvd: ModuleType, *, grace: float = 30.0) -> None:
        self._hvd: Any = hvd
        self._grace = grace
        self.broken: RankLostError | RanksDisagreeError | None = None
        self.rank: int = self._hvd.rank()
        self.size: int = self._hvd.size()
        self._transport: Transport = HorovodTransport(hvd)
        self._limit = math.inf  # of an agreement, in seconds; Horovod has its own
        self._finished = 0  # sums whose result is here
        self._question: Pending | None = None

    @property
    def asks(self) -> bool:
        """Whether a rank that waits for a sum finds out what the others do."""
        return self._transport.supports_unbounded_wait

    def connect(self, *, limit_seconds: float) -> None:
        """Let all travel by torch's Gloo from now on; all ranks have to do so.

        Args:
            limit_seconds: What takes longer fails.
        """
        if self.size > 1:
            self._transport = TorchTransport(
                self.rank, self.size, self.gather_objects, limit_seconds=limit_seconds
            )
            self._limit = limit_seconds

    def disconnect(self) -> None:
        """Let all travel by Horovod again; what other ranks never joined is abandoned."""
        self._transport.close()
        self._transport, self._limit = HorovodTransport(self._hvd), math.inf
        self._question = None

    def start(self, tensor: Tensor, name: str) -> Pending:
        """Start to sum a contiguous tensor over the ranks in place; `finish` ends it."""
        return self._start(self._transport.sum, tensor, name)

    def finish(self, pending: Pending, doing: str, agree: Callable[[], None]) -> None:
        """Wait for a sum, the first of those that were started.

        Args:
            pending: What `start` returned.
            doing: In words, for the error.
            agree: Claims what this rank does; called when others turn out to do something else.
        """
        while not pending.is_done_within(_SLICE_SECONDS):
            if self.asks and self._peer_is_waiting(doing):
                agree()
        self._take(pending, doing)
        self._finished += 1

    def wait(self, pending: Pending, doing: str, *, until: float = math.inf) -> Tensor:
        """Wait for what was started and return its result.

        Raises:
            RankLostError: A rank ended, or what the ranks asked for was refused.
            TimeoutError: It was not there ``until`` then, by the monotonic clock.
        """
        while not pending.is_done_within(min(_SLICE_SECONDS, until - time.monotonic())):
            if time.monotonic() > until:
                raise TimeoutError(f"It took too long: {doing}.")
        return self._take(pending, doing)

    def _take(self, pending: Pending, doing: str) -> Tensor:
        try:
            return pending.get_result()
        except RuntimeError as error:  # HorovodInternalError is one
            raise self._lost(doing, error) from error

    def agree(self, claim: CollectiveIntent) -> None:
        """Go on when all ranks are about to do the same. This is a barrier, too.

        Raises:
            RanksDisagreeError: They are not; raised on every rank.
        """
        self.agree_on(claim.fingerprint(), claim.doing, lambda: claim.items)

    def agree_on(self, fingerprint: int, doing: str, items: Callable[[], tuple[str, ...]]) -> None:
        """`agree` on a claim whose fingerprint is known; ``items`` is called on disagreement."""
        if self.size == 1:
            return
        if self.broken is not None:
            raise self.broken
        try:
            is_common = self._is_common(fingerprint, doing, time.monotonic() + self._limit)
        except TimeoutError as error:
            raise self._lost(doing, error) from error
        if not is_common:
            self._explain(CollectiveIntent(doing, items()))

    def announce(self, error: BaseException) -> None:
        """Tell the others why this rank ends; they raise at their next exchange.

        Waits until they have heard it, at most the grace. Never raises.
        """
        if self.broken is not None or self.size == 1:
            return
        claim = CollectiveIntent("ends with an error")
        try:
            limit = time.monotonic() + self._grace
            if not self._is_common(claim.fingerprint(), claim.doing, limit):
                self._explain(CollectiveIntent(f"ends with {_describe(error)}"))
        except (RankLostError, RanksDisagreeError, TimeoutError):
            return
        self.broken = RankLostError(
            "This rank has ended its part of the run.", rank=self.rank, doing="nothing"
        )

    @_normal_tensors
    def gather_objects(self, value: T) -> list[T]:
        """Return every rank's picklable object, in rank order."""
        if self.size == 1:
            return [value]
        payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        # What is unpickled was pickled by the same program on another rank of this run.
        return [
            cast(T, pickle.loads(part.numpy().tobytes()))  # noqa: S301
            for part in self._gather_bytes(payload, "d9m.objects")
        ]

    @_normal_tensors
    def gather_equal(self, tensor: Tensor, name: str) -> Tensor:
        """Return every rank's tensor, stacked in rank order to (world, ...).

        Raises:
            RanksDisagreeError: The ranks bring different shapes or dtypes, or do something else.
        """
        self.agree(CollectiveIntent(f"{name} of a tensor {tuple(tensor.shape)}, {tensor.dtype}"))
        if self.size == 1:
            return tensor.detach().clone()[None]
        if tensor.numel() == 0:
            return tensor.new_empty(self.size, *tensor.shape)
        gathered = self._gather(_as_bytes(tensor), "d9m.equal", name)
        return gathered.view(tensor.dtype).reshape(self.size, *tensor.shape)

    def broadcast_object(self, value: T, source: int) -> T:
        """Return the object of the rank ``source``; the others' values are not even pickled."""
        return cast(T, self.gather_objects(value if self.rank == source else None)[source])

    @_normal_tensors
    def gather_tensors(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's tensor, in rank order; shapes may differ, dtypes may not."""
        if self.size == 1:
            return [tensor]
        shapes = self.gather_objects(tuple(tensor.shape))
        parts = self._gather_bytes(_as_bytes(tensor), "d9m.tensors")
        # A slice at an odd offset cannot be viewed as a wider dtype: clone aligns it.
        return [
            part.clone().view(tensor.dtype).reshape(shape)
            for part, shape in zip(parts, shapes, strict=True)
        ]

    @_normal_tensors
    def broadcast_tensors(self, tensors: Sequence[Tensor], name: str) -> None:
        """Overwrite tensors of any dtype with the bytes of rank 0, one message per device."""
        if self.size == 1:
            return
        by_device: dict[torch.device, list[Tensor]] = {}
        for tensor in tensors:
            by_device.setdefault(tensor.device, []).append(tensor.detach())
        for index, group in enumerate(by_device.values()):
            flat = torch.cat([_as_bytes(tensor) for tensor in group])
            self.wait(self._start(self._transport.broadcast, flat, f"{name}.{index}"), name)
            if self.rank == 0:
                continue
            parts = flat.split([tensor.numel() * tensor.element_size() for tensor in group])
            for tensor, part in zip(group, parts, strict=True):
                tensor.copy_(part.clone().view(tensor.dtype).reshape(tensor.shape))

    def _start(
        self, function: Callable[[Tensor, str], Pending], tensor: Tensor, name: str
    ) -> Pending:
        try:
            return function(tensor, name)
        except RuntimeError as error:  # HorovodInternalError is one
            raise self._lost(name, error) from error
        except ValueError as error:
            if self._hvd.is_initialized():
                raise  # what was asked for is not possible
            raise self._lost(name, error) from error

    def _gather(self, tensor: Tensor, name: str, doing: str) -> Tensor:
        return self.wait(self._start(self._transport.gather, tensor, name), doing)

    def _gather_bytes(self, flat: Tensor, name: str) -> list[Tensor]:
        """Gather bytes whose number may differ from rank to rank."""
        length = torch.tensor([len(flat)])
        sizes = self._gather(length, f"{name}.sizes", name).tolist()
        padded = flat.new_zeros(max(1, *sizes))
        padded[: len(flat)] = flat
        rows = self._gather(padded, name, name).view(self.size, -1)
        return [row[:size] for row, size in zip(rows, sizes, strict=True)]

    def _is_common(self, fingerprint: int, doing: str, until: float) -> bool:
        if self._question is not None:
            self.wait(self._question, doing, until=until)
            self._question = None
        lowest = _ASKS
        while lowest == _ASKS:
            answer = self.wait(self._claim(fingerprint), doing, until=until)
            lowest, opposite, _ = answer.tolist()
        return bool(lowest == -opposite)

    def _peer_is_waiting(self, doing: str) -> bool:
        """Ask, without waiting: whether a rank claims something, and none has finished this sum."""
        if self._question is None:
            self._question = self._claim(_ASKS)
        if not self._question.is_done_within(0.0):
            return False
        _, opposite, finished = self.wait(self._question, doing).tolist()
        self._question = None
        return bool(-opposite != _ASKS and -finished <= self._finished)

    @_normal_tensors
    def _claim(self, fingerprint: int) -> Pending:
        # The minimum of x and of -x at once: all equal exactly when they are opposite.
        numbers = torch.tensor([fingerprint, -fingerprint, -self._finished])
        return self._start(self._transport.minimise, numbers, "d9m.agree")

    def _explain(self, claim: CollectiveIntent) -> None:
        current = sys.exc_info()[1]
        if current is not None and not claim.doing.startswith("ends with"):
            claim = CollectiveIntent(
                f"{claim.doing}, while handling {_describe(current)}", claim.items
            )
        claims = self.gather_objects(claim)
        self.broken = RanksDisagreeError(
            compose_disagreement(claims), claims=[each.doing for each in claims]
        )
        raise self.broken

    def _lost(self, doing: str, error: Exception) -> RankLostError:
        text = str(error).strip().splitlines()
        self.broken = RankLostError(
            f"Rank {self.rank} waited for {doing}, but another rank ended or Horovod stopped: look "
            "at the output of the other ranks for the first error. What came back is: "
            f"{text[0] if text else type(error).__name__}",
            rank=self.rank,
            doing=doing,
        )
        return self.broken


def compose_disagreement(claims: Sequence[CollectiveIntent]) -> str:
    """Say in words how the claims of the ranks differ."""
    if len({claim.doing for claim in claims}) > 1:
        lines = [f"  rank {rank}: {claim.doing}" for rank, claim in enumerate(claims)]
        return "\n".join(
            ["The ranks are about to do different things, so that none can go on:", *lines]
        )
    sets = [frozenset(claim.items) for claim in claims]
    everywhere = frozenset[str].intersection(*sets)
    differing = sorted(frozenset[str].union(*sets) - everywhere)
    lines = []
    for name in differing[:_LIMIT_OF_NAMES]:
        have = [str(rank) for rank, items in enumerate(sets) if name in items]
        lack = [str(rank) for rank, items in enumerate(sets) if name not in items]
        lines.append(f"  {name}: yes on rank {', '.join(have)}; no on rank {', '.join(lack)}")
    if len(differing) > _LIMIT_OF_NAMES:
        lines.append(f"  and {len(differing) - _LIMIT_OF_NAMES} more")
    return "\n".join([f"The ranks do not agree on what takes part in {claims[0].doing}:", *lines])


def _describe(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _as_bytes(tensor: Tensor) -> Tensor:
    normal = tensor.clone() if tensor.is_inference() else tensor
    return normal.detach().contiguous().reshape(-1).view(torch.uint8)
