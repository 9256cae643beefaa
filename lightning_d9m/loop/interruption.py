"""Interruptions of a recorded loop, for ``d9m repeat --interrupt``: survey, save and kill, resume.

The saved state is what the recorder knows: model, optimizers, schedulers, generators and position.
A point lies where the loop asks for its next batch, after all that follows ``run.step`` and
``run.epoch`` in the program. It counts steps, because gradients between steps are not saved.
"""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_d9m.launch.interruption_points import (
    CHECKPOINT,
    MARK,
    EpochShape,
    InterruptionKind,
    InterruptRequest,
    write_survey,
)
from lightning_d9m.ranks.ranks import Ranks


class Interruption:
    """Surveys a loop, or saves it at a point and kills its process there.

    The parts are the model, the optimizers, the schedulers and the recorder. Each rank saves
    its own file.
    """

    def __init__(self, request: InterruptRequest, parts: Mapping[str, Any], ranks: Ranks) -> None:
        self._request = request
        self._parts = parts
        self._ranks = ranks
        self._shapes: list[EpochShape] = []
        self._steps = 0
        self._complete = False
        self._remaining: int | None = None

    def resume(self) -> None:
        """Load what an interrupted run saved, if a variable names it."""
        resume = self._request.resume
        if resume is None:
            return
        path = _path_of_rank(resume, self._ranks.rank)
        saved = self._ranks.raise_on_all(
            lambda: torch.load(path, map_location="cpu", weights_only=True)
        )
        for name, part in self._parts.items():
            part.load_state_dict(saved[name])

    def end_step(self) -> None:
        """Note that a step of the optimizer is done."""
        self._steps += 1
        self._complete = True

    def end_epoch(self, epoch: int, loaders: int) -> None:
        """Note the number of steps in an epoch that is done.

        With several ``loaders``, or calls of ``batches``, nothing can be saved within it.
        """
        steps = self._steps if loaders == 1 else 1
        self._shapes.append(EpochShape(epoch, steps, accumulated=1, validation=0, unit="step"))

    def start_epoch(self, epoch: int) -> None:
        """Act if the point is the end of the epoch before."""
        self._act_at("epoch", epoch - 1, 0)
        self._steps = 0

    def end_batch(self, epoch: int) -> None:
        """Act if the point is this batch, whose step is done; the loop asks for the next one."""
        if not self._complete:
            return
        self._complete = False
        self._count_down()
        self._act_at("batch", epoch, self._steps)

    def finish(self) -> None:
        """Write the survey, if it was asked for."""
        folder = self._request.folder
        if folder is not None and self._request.point is None and self._ranks.rank == 0:
            write_survey(folder, self._shapes)

    def _count_down(self) -> None:
        """Kill if the last step after the save is done."""
        if self._remaining is not None:
            self._remaining -= 1
            if self._remaining == 0:
                self._kill()

    def _act_at(self, kind: InterruptionKind, epoch: int, number: int) -> None:
        if self._is_point(kind, epoch, number):
            saved = {name: part.state_dict() for name, part in self._parts.items()}
            path = _path_of_rank(self._checkpoint, self._ranks.rank)
            self._ranks.raise_on_all(lambda: torch.save(saved, path))
            self._end_save()

    def _is_point(self, kind: InterruptionKind, epoch: int, number: int) -> bool:
        """Return whether to save now."""
        point = self._request.point
        if point is None or self._remaining is not None:
            return False
        return (kind, epoch, number) == (point.kind, point.epoch, point.number)

    @property
    def _checkpoint(self) -> Path:
        assert self._request.folder is not None, "there is a point"
        return self._request.folder / CHECKPOINT

    def _end_save(self) -> None:
        """Count the steps to the kill from now on."""
        assert self._request.point is not None, "it was reached"
        self._remaining = self._request.point.later
        if self._remaining == 0:
            self._kill()

    def _kill(self) -> None:
        """Kill this process with SIGKILL, on every rank."""
        # A launcher ends all ranks when one has died; that must not happen before the file exists.
        self._wait_for_ranks()
        if self._ranks.rank == 0:
            self._checkpoint.with_name(MARK).write_text(str(self._request.point))
        self._wait_for_ranks()
        os.kill(os.getpid(), signal.SIGKILL)

    def _wait_for_ranks(self) -> None:
        self._ranks.raise_on_all(lambda: None)


def name_parts(
    model: torch.nn.Module,
    optimizers: tuple[Any, ...],
    schedulers: tuple[Any, ...],
    recorder: Any,
) -> dict[str, Any]:
    """Return all that is saved by name; the recorder, which restores the generators, is last."""
    named = {"model": model}
    for kind, parts in (("optimizer", optimizers), ("scheduler", schedulers)):
        named |= {f"{kind} {number}": part for number, part in enumerate(parts)}
    return {**named, "recorder": recorder}


def _path_of_rank(path: Path, rank: int) -> Path:
    return path if rank == 0 else path.with_name(f"{path.name}-{rank}")
