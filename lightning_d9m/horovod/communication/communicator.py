"""Collectives between ranks that neither spin nor hang.

Before each exchange the ranks agree on it: they compare fingerprints of what they are about to do.
So a rank in the backward pass that meets a rank at a barrier finds out, and both can report it. The
agreement of a backward pass takes 3 to 6 % of a step with four ranks on two cores.
"""

import math
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from lightning_d9m.errors import RankLostError, RanksDisagreeError
from lightning_d9m.horovod.communication.groups import HorovodGroup, open_gloo, open_nccl
from lightning_d9m.horovod.communication.intents import CollectiveIntent, make_disagreement
from lightning_d9m.horovod.communication.rank_store import connect_liveness
from lightning_d9m.ranks.connections import close_connections
from lightning_d9m.ranks.groups import as_bytes, broadcast_tensors, gather_equal, ranks_of_group
from lightning_d9m.ranks.liveness import RankLiveness, summarize_error
from lightning_d9m.state.plain_data import decode_plain, encode_plain

T = TypeVar("T")
_SLICE = timedelta(seconds=0.5)  # of a wait, after which Python handles signals
_POLL_SECONDS = 0.001
# Lightning validates in inference mode, whose tensors Horovod's thread may not write to.
_normal_tensors = torch.inference_mode(mode=False)


class Communicator:
    """The collectives of one run.

    ``hvd`` is the module ``horovod.torch``, initialized. For ``grace`` seconds a rank that
    failed waits for the others to learn why.

    Collectives are paired by the order in which ranks start them. Therefore sums and broadcasts,
    which may be pending when a rank starts something else, have one group, and agreements and
    gathers have another.

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
        self._use_horovod()

    def _use_horovod(self) -> None:
        self._tensors: Any = HorovodGroup(self._hvd, "tensors")
        self._control: Any = HorovodGroup(self._hvd, "control")
        self._nccl: Any = None

    def connect(self, *, limit_seconds: float, device: str = "cpu") -> None:
        """Use torch's Gloo from now on, and its NCCL on CUDA; every rank must call this.

        A collective that takes longer than the limit fails.
        """
        if self.size == 1:
            return
        given = (self.rank, self.size, self.gather_objects, timedelta(seconds=limit_seconds))
        nccl = open_nccl(*given) if device == "cuda" else None
        tensors, control = open_gloo(*given), open_gloo(*given)
        self._tensors, self._control, self._nccl = tensors, control, nccl

    def watch_ranks(self) -> None:
        """Let errors name the lost ranks; every rank must call this."""
        if self.size > 1:
            self.liveness = connect_liveness(self.rank, self.gather_objects)

    @property
    def process_group(self) -> Any:
        """The group that sums gradients; None for a single rank."""
        return None if self.size == 1 else self._nccl or self._tensors

    def disconnect(self) -> None:
        """Use Horovod again, and abandon collectives that other ranks never joined."""
        if self._nccl is not None:
            if self.broken is None:
                self._wait_for_device()
            self._nccl.abort()
        self._close_connections()
        self._use_horovod()
        self.liveness = None

    def _wait_for_device(self) -> None:
        """Wait for the last collectives, which may still run; another rank may never join them."""
        event = torch.cuda.Event()
        event.record()
        until = time.monotonic() + self._grace
        while not event.query() and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)

    def _close_connections(self) -> None:
        for group in (self._tensors, self._control):
            if not isinstance(group, HorovodGroup):  # which runs until the process ends
                close_connections(group)

    # Agreements

    def agree(self, intent: CollectiveIntent) -> None:
        """Wait until every rank announces the same intent; so this is also a barrier.

        Raises:
            RanksDisagreeError: The intents differ; raised on every rank.
        """
        if self.size == 1:
            return
        if self.broken is not None:
            raise self.broken
        if not self._is_common(intent, math.inf):
            self._raise_disagreement(intent)

    def announce(self, error: BaseException) -> None:
        """Publish why this rank ends, so that its peers raise at their next exchange.

        Waits for them, at most the grace period. Never raises.
        """
        if self.broken is not None or self.size == 1:
            return
        if self.liveness is not None:
            self.liveness.report_error(error)
        try:
            until = time.monotonic() + self._grace
            if not self._is_common(CollectiveIntent("ends with an error"), until):
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

    def _is_common(self, intent: CollectiveIntent, until: float) -> bool:
        own = intent.fingerprint()
        return set(self._exchange(own, intent.activity, until, first=16)) == {own}

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

    # Plain values

    def gather_objects(self, value: T) -> list[T]:
        """Return every rank's plain value (see `encode_plain`), in rank order.

        Raises:
            SettingError: The value is not plain data.
        """
        if self.size == 1:
            return [value]
        data = self._exchange(encode_plain(value), "an exchange of values")
        return [cast(T, decode_plain(part)) for part in data]

    def broadcast_object(self, value: T, source: int) -> T:
        """Return the plain value of the rank ``source``; other ranks' values are not sent.

        Raises:
            SettingError: The value is not plain data; the other ranks learn it from `announce`.
        """
        data = encode_plain(value) if self.rank == source else b""
        activity = f"a broadcast from rank {source}"
        self.agree(CollectiveIntent(activity))
        if self.size == 1:
            return value
        return cast(T, decode_plain(self._exchange(data, activity)[source]))

    def _exchange(
        self, data: bytes, activity: str, until: float = math.inf, **options: Any
    ) -> list[bytes]:
        """Return every rank's bytes, whose lengths may differ."""
        ranks = ranks_of_group(self._control, lambda work: self._wait(work, activity, until))
        return self._name_lost(activity, lambda: ranks.gather_bytes(data, **options))

    # Tensors

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
        gathered = self._gather(as_bytes(tensor), name)
        return gathered.view(tensor.dtype).reshape(self.size, *tensor.shape)

    @_normal_tensors
    def gather_tensors(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's tensor, in rank order; shapes may differ, dtypes may not."""
        if self.size == 1:
            return [tensor]
        return [part.to(tensor.device) for part in self.gather_objects(tensor.detach())]

    @_normal_tensors
    def broadcast_tensors(self, tensors: Sequence[Tensor], name: str) -> None:
        """Overwrite tensors of any dtype with the bytes of rank 0, one message per device."""
        if self.size == 1:
            return
        broadcast_tensors(tensors, lambda flat: self._broadcast(flat, name))

    def _broadcast(self, flat: Tensor, name: str) -> None:
        group, wait = self._route(flat, self._tensors, name)
        self._name_lost(name, lambda: wait(group.broadcast(flat, 0)))

    def _gather(self, flat: Tensor, name: str) -> Tensor:
        group, wait = self._route(flat, self._control, name)
        return self._name_lost(name, lambda: gather_equal(group, flat, wait))

    def _route(self, flat: Tensor, group: Any, name: str) -> tuple[Any, Callable[[Any], None]]:
        """Return the group that sends a tensor, and what waits: for NCCL the current stream."""
        if flat.is_cuda and self._nccl is not None:
            return self._nccl, lambda work: work.wait()
        return group, lambda work: self._wait(work, name)

    # Waits

    def _wait(self, work: Any, activity: str, until: float = math.inf) -> None:
        """Wait for a collective.

        Raises:
            TimeoutError: It did not end before ``until`` of the monotonic clock.
        """
        while not _is_done_soon(work):
            if time.monotonic() > until:
                raise TimeoutError(f"It took too long: {activity}.")
        work.wait()

    def _name_lost(self, activity: str, function: Callable[[], T]) -> T:
        """Call a function, and raise the error of a collective that failed in it."""
        try:
            return function()
        except (RuntimeError, ValueError) as error:  # HorovodInternalError is one
            if isinstance(error, ValueError) and self._hvd.is_initialized():
                raise  # the collective does not support this tensor
            raise self.make_lost_error(activity, error) from error

    def make_lost_error(self, activity: str, error: Exception) -> RankLostError:
        """Return the error of a collective that failed, with the ranks that are lost."""
        self._close_connections()  # a rank that waits for this one would seem to hang
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


def _is_done_soon(work: Any) -> bool:
    """Wait a while for a collective, and return whether it has ended, perhaps by an error."""
    try:
        work.wait(_SLICE)
    except RuntimeError:
        return bool(work.is_completed())
    return True
