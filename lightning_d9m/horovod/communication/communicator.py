"""Collectives between ranks that neither spin nor hang.

Before each exchange the ranks agree on it: they reduce a fingerprint of what they are about to do.
So a rank in the backward pass that meets a rank at a barrier finds out, and both can report it.

A reduction of gradients needs no agreement round if starting it already proves agreement: every
gradient has arrived, and the layout of the buckets is known to be equal. A rank that waits too long
for such a reduction starts a poll, which is a fingerprint reduction with the value ``_POLL``, and
does not wait for it. Its peers answer with their next fingerprint. Then every rank that has
announced an intent announces it again, and so does the polling rank, unless another rank has
finished the reduction already.

Polling replaces one agreement round per backward pass, which costs 3 to 6 % of the time of a step
with four ranks on two cores, and 0 %, 7 % and 17 % of its CPU time in three rounds with two ranks
and 150 small parameters (``benchmarks/horovod_fusion.py --modes static static-agreeing``).
"""

import math
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from lightning_d9m.errors import RankLostError, RanksDisagreeError
from lightning_d9m.horovod.communication.intents import CollectiveIntent, make_disagreement
from lightning_d9m.horovod.communication.nccl_transport import NcclTransport, StreamPending
from lightning_d9m.horovod.communication.transports import (
    HorovodTransport,
    Pending,
    TorchTransport,
    Transport,
)
from lightning_d9m.recording.rank_liveness import RankLiveness, summarize_error
from lightning_d9m.state.plain_data import decode_plain, encode_plain

T = TypeVar("T")
# After each slice of a wait, Python handles signals and the rank polls its peers.
_SLICE_SECONDS = 0.5
_POLL = -1  # the fingerprint of a rank that polls its peers
# Lightning validates in inference mode, whose tensors Horovod's thread may not write to.
_normal_tensors = torch.inference_mode(mode=False)


class Communicator:
    """The collectives of one run.

    ``hvd`` is the module ``horovod.torch``, initialized. For ``grace`` seconds a rank that
    failed waits for the others to learn why.

    Attributes:
        broken: The error after which no collective works any more, or None.
        liveness: Finds lost ranks after a collective has failed; None if that is not possible.
    """

    def __init__(self, hvd: ModuleType, *, grace: float = 30.0) -> None:
        self._hvd: Any = hvd
        self._grace = grace
        self.broken: RankLostError | RanksDisagreeError | None = None
        self.liveness: RankLiveness | None = None
        self.rank: int = self._hvd.rank()
        self.size: int = self._hvd.size()
        self._transport: Transport = HorovodTransport(hvd)
        self._limit = math.inf  # of an agreement, in seconds; Horovod has its own
        self._finished = 0  # the number of finished reductions
        self._enqueued: list[Pending] = []  # reductions for which streams wait, but not the host
        self._poll: Pending | None = None

    @property
    def polls_peers(self) -> bool:
        """Whether a rank that waits for a reduction finds out what its peers do."""
        return self._transport.supports_unbounded_wait

    def connect(self, *, limit_seconds: float, device: str = "cpu") -> None:
        """Use torch's Gloo from now on, and its NCCL on CUDA; every rank must call this.

        A collective that takes longer than the limit fails.
        """
        if self.size > 1:
            make = NcclTransport if device == "cuda" else TorchTransport
            self._transport = make(
                self.rank, self.size, self.gather_objects, limit_seconds=limit_seconds
            )
            self._limit = limit_seconds

    @property
    def process_group(self) -> Any:
        """The process group of torch for gradients, after `connect`; None for a single rank."""
        if isinstance(self._transport, TorchTransport):
            return self._transport.process_group
        return None

    def disconnect(self) -> None:
        """Use Horovod again, and abandon collectives that other ranks never joined."""
        if self.broken is None:  # the last ones may still run on the device
            until = time.monotonic() + self._grace
            for pending in self._enqueued:
                pending.is_done_within(max(0.0, until - time.monotonic()))
        self._enqueued = []
        self._transport.close()
        self._transport, self._limit = HorovodTransport(self._hvd), math.inf
        self._poll = self.liveness = None

    def start(self, tensor: Tensor, name: str, activity: str) -> Pending:
        """Start to sum a contiguous tensor over the ranks in place; `finish` waits for it.

        The sum replaces the tensor. Its name is equal on all ranks, and the activity
        describes it in an error.

        Raises:
            RankLostError: It is known already that a rank ended.
        """
        return self._start(self._transport.sum, tensor, name, activity)

    def finish(self, pending: Pending, activity: str, agree: Callable[[], None]) -> None:
        """Wait for the first reduction that was started and is not finished.

        On CUDA with torch's transport, the current stream waits, and the host does not: `confirm`
        waits in the next backward pass.

        ``agree`` announces this rank's intent; it is called when a peer is about to do
        something else.
        """
        if isinstance(pending, StreamPending):
            self._enqueued.append(pending)
        else:
            self._wait_or_agree(pending, activity, agree)
            self._finished += 1
        self._take(pending, activity)

    def confirm(self, activity: str, agree: Callable[[], None]) -> None:
        """Wait for the reductions of the pass before that a device may not have finished.

        It has, unless a rank is late or lost: the device has computed a whole pass since.
        """
        while self._enqueued:
            self._wait_or_agree(self._enqueued[0], activity, agree)
            del self._enqueued[0]
            self._finished += 1

    def _wait_or_agree(self, pending: Pending, activity: str, agree: Callable[[], None]) -> None:
        while not pending.is_done_within(_SLICE_SECONDS):
            if self.polls_peers and self._peer_is_waiting(activity):
                agree()

    def wait(self, pending: Pending, activity: str, *, until: float = math.inf) -> Tensor:
        """Wait for a collective and return its result.

        Raises:
            RankLostError: A rank ended, or the collective was refused.
            TimeoutError: The result did not arrive before ``until`` of the monotonic clock.
        """
        while not pending.is_done_within(min(_SLICE_SECONDS, until - time.monotonic())):
            if time.monotonic() > until:
                raise TimeoutError(f"It took too long: {activity}.")
        return self._take(pending, activity)

    def _take(self, pending: Pending, activity: str) -> Tensor:
        try:
            return pending.get_result()
        except RuntimeError as error:  # HorovodInternalError is one
            raise self.make_lost_error(activity, error) from error

    def agree(self, intent: CollectiveIntent) -> None:
        """Wait until every rank announces the same intent; so this is also a barrier.

        Raises:
            RanksDisagreeError: The intents differ; raised on every rank.
        """
        self.agree_on(intent.fingerprint(), intent.activity, lambda: intent.items)

    def agree_on(
        self, fingerprint: int, activity: str, items: Callable[[], tuple[str, ...]]
    ) -> None:
        """`agree` on an intent with a known fingerprint; ``items`` is called on disagreement."""
        if self.size == 1:
            return
        if self.broken is not None:
            raise self.broken
        try:
            is_common = self._is_common(fingerprint, activity, time.monotonic() + self._limit)
        except TimeoutError as error:
            raise self.make_lost_error(activity, error) from error
        if not is_common:
            self._raise_disagreement(CollectiveIntent(activity, items()))

    def announce(self, error: BaseException) -> None:
        """Publish why this rank ends, so that its peers raise at their next exchange.

        Waits for them, at most the grace period. Never raises.
        """
        if self.broken is not None or self.size == 1:
            return
        if self.liveness is not None:
            self.liveness.report_error(error)
        intent = CollectiveIntent("ends with an error")
        try:
            limit = time.monotonic() + self._grace
            if not self._is_common(intent.fingerprint(), intent.activity, limit):
                self._raise_disagreement(CollectiveIntent(f"ends with {summarize_error(error)}"))
        except (RankLostError, RanksDisagreeError, TimeoutError):
            return
        self._end()

    def leave(self, error: BaseException) -> None:
        """Publish why this rank ends, and close the connections, on which its peers may wait."""
        if self.broken is None and self.size > 1:
            if self.liveness is not None:
                self.liveness.report_error(error)
            self._end()
        self.disconnect()

    def _end(self) -> None:
        self.broken = RankLostError(
            "This rank has ended its part of the run.", rank=self.rank, activity="nothing"
        )

    def gather_objects(self, value: T) -> list[T]:
        """Return every rank's plain value (see `encode_plain`), in rank order.

        Raises:
            SettingError: The value is not plain data.
        """
        if self.size == 1:
            return [value]
        return [cast(T, decode_plain(part)) for part in self._gather_payloads(encode_plain(value))]

    @_normal_tensors
    def _gather_payloads(self, data: bytes) -> list[bytes]:
        payload = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
        return [part.numpy().tobytes() for part in self._gather_bytes(payload, "d9m.objects")]

    def broadcast_object(self, value: T, source: int) -> T:
        """Return the plain value of the rank ``source``; other ranks' values are not sent.

        Raises:
            SettingError: The value is not plain data; the other ranks learn it from `announce`.
        """
        data = encode_plain(value) if self.rank == source else b""
        self.agree(CollectiveIntent(f"a broadcast from rank {source}"))
        if self.size == 1:
            return value
        return cast(T, decode_plain(self._gather_payloads(data)[source]))

    @_normal_tensors
    def gather_equal(self, tensor: Tensor, name: str) -> Tensor:
        """Return every rank's tensor, stacked in rank order to (world, ...).

        Raises:
            RanksDisagreeError: Shapes, dtypes or activities of the ranks differ.
        """
        self.agree(CollectiveIntent(f"{name} of a tensor {tuple(tensor.shape)}, {tensor.dtype}"))
        if self.size == 1:
            return tensor.detach().clone()[None]
        if tensor.numel() == 0:
            return tensor.new_empty(self.size, *tensor.shape)
        gathered = self._gather(_as_bytes(tensor), "d9m.equal", name)
        return gathered.view(tensor.dtype).reshape(self.size, *tensor.shape)

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
            pending = self._start(self._transport.broadcast, flat, f"{name}.{index}", name)
            if isinstance(pending, StreamPending):
                self._take(pending, name)  # the host need not wait
            else:
                self.wait(pending, name)
            if self.rank == 0:
                continue
            parts = flat.split([tensor.numel() * tensor.element_size() for tensor in group])
            for tensor, part in zip(group, parts, strict=True):
                tensor.copy_(part.clone().view(tensor.dtype).reshape(tensor.shape))

    def _start(
        self,
        function: Callable[[Tensor, str], Pending],
        tensor: Tensor,
        name: str,
        activity: str,
    ) -> Pending:
        try:
            return function(tensor, name)
        except RuntimeError as error:  # HorovodInternalError is one
            raise self.make_lost_error(activity, error) from error
        except ValueError as error:
            if self._hvd.is_initialized():
                raise  # the collective does not support this tensor
            raise self.make_lost_error(activity, error) from error

    def _gather(self, tensor: Tensor, name: str, activity: str) -> Tensor:
        return self.wait(self._start(self._transport.gather, tensor, name, activity), activity)

    def _gather_bytes(self, flat: Tensor, name: str) -> list[Tensor]:
        """Gather bytes whose number may differ from rank to rank."""
        length = torch.tensor([len(flat)])
        sizes = self._gather(length, f"{name}.sizes", name).tolist()
        padded = flat.new_zeros(max(1, *sizes))
        padded[: len(flat)] = flat
        rows = self._gather(padded, name, name).view(self.size, -1)
        return [row[:size] for row, size in zip(rows, sizes, strict=True)]

    def _is_common(self, fingerprint: int, activity: str, until: float) -> bool:
        if self._poll is not None:
            self.wait(self._poll, activity, until=until)
            self._poll = None
        lowest = _POLL
        while lowest == _POLL:
            answer = self.wait(
                self._reduce_fingerprint(fingerprint, activity), activity, until=until
            )
            lowest, opposite, _ = answer.tolist()
        return bool(lowest == -opposite)

    def _peer_is_waiting(self, activity: str) -> bool:
        """Poll, without waiting, whether a rank has announced an intent.

        A rank that has finished the pending reduction does not count: the result is on its way.
        """
        if self._poll is None:
            self._poll = self._reduce_fingerprint(_POLL, activity)
        if not self._poll.is_done_within(0.0):
            return False
        _, opposite, finished = self.wait(self._poll, activity).tolist()
        self._poll = None
        return bool(-opposite != _POLL and -finished <= self._finished)

    @_normal_tensors
    def _reduce_fingerprint(self, fingerprint: int, activity: str) -> Pending:
        # The minimum of x and of -x at once: all are equal exactly when these are opposite.
        numbers = torch.tensor([fingerprint, -fingerprint, -self._finished])
        return self._start(self._transport.minimize, numbers, "d9m.agree", activity)

    def _raise_disagreement(self, intent: CollectiveIntent) -> None:
        current = sys.exc_info()[1]
        if current is not None and not intent.activity.startswith("ends with"):
            intent = CollectiveIntent(
                f"{intent.activity}, while handling {summarize_error(current)}", intent.items
            )
        gathered = self.gather_objects((intent.activity, intent.items))
        intents = [CollectiveIntent(activity, items) for activity, items in gathered]
        self.broken = make_disagreement(intents)
        raise self.broken

    def make_lost_error(self, activity: str, error: Exception) -> RankLostError:
        """Return the error of a collective that failed, with the ranks that are lost."""
        if isinstance(self._transport, TorchTransport):
            self._transport.fail()  # a rank that waits for this one would seem to hang
        lost = {} if self.liveness is None else self.liveness.find_lost()
        cause = " ".join(lost.values()) or (
            "Another rank ended or Horovod stopped: look at the output of the other ranks for the "
            "first error."
        )
        self.broken = RankLostError(
            f"Rank {self.rank} waited for {activity}, but the collective failed. {cause} The "
            f"collective reported: {summarize_error(error)}",
            rank=self.rank,
            activity=activity,
            lost=tuple(lost),
        )
        return self.broken


def _as_bytes(tensor: Tensor) -> Tensor:
    normal = tensor.clone() if tensor.is_inference() else tensor
    return normal.detach().contiguous().reshape(-1).view(torch.uint8)
