"""Sums of gradients over Horovod's processes, which name the lost process if an exchange fails."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_d9m.errors import D9mError
from lightning_d9m.horovod.communication.communicator import Communicator
from lightning_d9m.logical_ranks.gradients import LogicalGradients


class WatchedGradients(LogicalGradients):
    """The sums of logical ranks, over the processes of a communicator."""

    def __init__(self, communicator: Communicator, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.communicator = communicator

    def set_aside(self, logical_rank: int) -> None:
        """See `LogicalGradients`."""
        with self._watched():
            super().set_aside(logical_rank)

    def finish(self, logical_rank: int) -> None:
        """See `LogicalGradients`."""
        with self._watched():
            super().finish(logical_rank)

    def launch(self, bucket: Any) -> None:
        """See `LogicalGradients`."""
        with self._watched():
            super().launch(bucket)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except D9mError:
            raise
        except RuntimeError as error:  # of the transport: no code of the user runs inside
            raise self.communicator.make_lost_error("the sum of gradients", error) from error
