# ruff: noqa: SLF001 - see adapters.progress
"""Exact resume: what a checkpoint needs beyond Lightning's own content, saved and put back.

It is kept under one key, as plain values that ``torch.load(weights_only=True)`` reads:

- ``seed``, ``fit``, ``settings``, ``world_size``: which streams the run draws from;
- ``place``: the epoch, the global step, how many batches of the epoch were trained;
- ``ranks``: for each rank, what only it knows (see ``adapters/pieces``) and its ledger;
- ``seal``: one digest for each tensor of the checkpoint (see ``evidence/seal``).
"""

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Literal
from warnings import catch_warnings, filterwarnings, warn

import torch

from lightning_d9m.adapters import pieces
from lightning_d9m.adapters.checkpoint_file import KEY, is_sharded
from lightning_d9m.adapters.progress import Place, find_place, settle, skip_to_end
from lightning_d9m.adapters.takeover import Takeover
from lightning_d9m.adapters.testimony import Testimony, ranks_of
from lightning_d9m.control.position import find_position_problem
from lightning_d9m.errors import InexactResumeError
from lightning_d9m.evidence.seal import make_seal

FORMAT = 1


class Resumption:
    """Saves and restores the state of one callback's fits.

    Args:
        on_inexact: ``"raise"`` or ``"warn"``, where a run cannot be resumed exactly.
    """

    def __init__(self, on_inexact: Literal["raise", "warn"] = "raise") -> None:
        self._on_inexact = on_inexact
        self._kept: dict[str, Any] | None = None
        self._resumed: dict[str, Any] | None = None
        self._reasons: list[str] = []
        self._at_end = False

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": None, "_resumed": None, "_reasons": []}

    def keep(self, trainer: Any, run: Takeover, testimony: Testimony, *, ended: bool) -> None:
        """Keep the state of a run that is about to be given back, for whoever saves it later.

        Args:
            trainer: The Trainer.
            run: Its run.
            testimony: Its evidence.
            ended: Whether it came to its end. Every rank calls it then; other ranks may have left
                by the time that one saves. Otherwise the ranks talk when they save.
        """
        if run.stage != "fit":
            return
        mine = self._capture(trainer, run, testimony)
        ranks = self._gather(trainer, mine) if ended else None
        self._kept = {**self._describe(trainer, run), "ranks": ranks, "mine": mine}

    def save(
        self, trainer: Any, run: Takeover | None, testimony: Testimony, checkpoint: dict[str, Any]
    ) -> None:
        """Put the state into a checkpoint. Every rank calls it, unless the run has ended."""
        if run is not None and run.stage == "fit":
            state = self._describe(trainer, run)
            state["ranks"] = self._gather(trainer, self._capture(trainer, run, testimony))
        elif self._kept is not None:
            state = dict(self._kept)
            mine = state.pop("mine")
            if state["ranks"] is None:
                state["ranks"] = self._gather(trainer, mine)
        else:  # a Trainer that has not trained
            return
        checkpoint[KEY] = state
        _seal_when_saved(trainer)

    def load(self, trainer: Any, run: Takeover, checkpoint: Mapping[str, Any]) -> None:
        """Read the state of a checkpoint that a fit goes on from.

        Raises:
            InexactResumeError: When it cannot be resumed exactly, unless that is to be a warning.
        """
        state = checkpoint.get(KEY)
        if run.stage != "fit" or _is_untrained(state):
            return
        problems = _find_problems(state, trainer, run)
        if problems:
            self._complain(trainer, problems)
        if isinstance(state, Mapping) and state.get("format") == FORMAT:
            self._resumed = dict(state)
            if not _other_world(state, trainer):
                run.resume_fit(state["fit"])

    def attach(self, trainer: Any, run: Takeover) -> None:
        """Prepare a fit for a checkpoint that it may go on from; before that is loaded."""
        self._kept = self._resumed = None
        self._reasons = []
        if run.stage == "fit":
            run.resume(
                self._loops_wrapped(trainer, run),
                lambda loader: self._place_loader(trainer, run, loader),
            )

    @contextmanager
    def _loops_wrapped(self, trainer: Any, run: Takeover) -> Iterator[None]:
        fit = trainer.fit_loop
        reset: Callable[[], None] = fit.reset
        reset_epoch: Callable[[], None] = fit.epoch_loop.reset
        on_run_start: Callable[..., None] = fit.epoch_loop.on_run_start

        def settle_and_reset() -> None:
            if _has_loaded(trainer):
                pieces.restore_metrics(trainer, self._rank_state(trainer))
                self._at_end = settle(trainer, self._place(trainer))
            reset()

        def reset_epoch_quietly() -> None:
            with catch_warnings():
                if self._resumed is not None and not self._reasons:
                    # What Lightning cannot do, the loaders under control can.
                    filterwarnings("ignore", "You're resuming from a checkpoint that ended before")
                reset_epoch()

        def start_and_restore(*args: Any) -> None:
            if _iterates_again(trainer):
                run.restart_epoch(trainer.current_epoch)
            on_run_start(*args)
            # Else Lightning leaves out what schedulers do at the end of the epoch.
            fit._restarting = False
            if self._at_end:
                self._at_end = False
                skip_to_end(trainer)
            self._restore(trainer)

        fit.reset = settle_and_reset
        fit.epoch_loop.reset = reset_epoch_quietly
        fit.epoch_loop.on_run_start = start_and_restore
        try:
            yield
        finally:
            del fit.reset, fit.epoch_loop.reset, fit.epoch_loop.on_run_start

    def _place_loader(self, trainer: Any, run: Takeover, loader: object) -> None:
        if not _has_loaded(trainer):
            return
        place = self._place(trainer)
        problem = find_position_problem(loader) if place.batch else None
        if problem is not None:
            self._complain(trainer, [problem])
        fit = trainer.fit_loop
        run.resume_loaders(
            place.epoch,
            place.batch,
            # Lightning keeps the loaders together from after this to when they are iterated.
            lambda: fit._combined_loader._mode == "max_size_cycle",
            self._rank_state(trainer).get("samplers", {}),
        )

    def begin(self, trainer: Any, testimony: Testimony) -> None:
        """Continue the ledger, and restore what an epoch does not seed; before training starts."""
        if self._resumed is None and not self._reasons:
            return
        place = self._place(trainer)
        rank = self._rank_state(trainer)
        ledger = rank.get("ledger") or {}
        testimony.resume(
            {
                "parent": ledger.get("folder", ""),
                "parent_check": ledger.get("check", ""),
                "epoch": place.epoch,
                "step": place.step,
                "batch": place.batch,
                **({"inexact": list(self._reasons)} if self._reasons else {}),
            },
            rank.get("testimony", {}),
        )
        pieces.restore_outside(trainer, rank)

    def _restore(self, trainer: Any) -> None:
        """Restore what training has drawn; as late as possible before the next batch."""
        resumed, self._resumed = self._resumed, None
        if resumed is None or resumed["place"]["moment"] == "epoch":
            return
        pieces.restore_within(trainer, _rank_of(resumed, trainer))

    def _place(self, trainer: Any) -> Place:
        return find_place(trainer) if self._resumed is None else Place(**self._resumed["place"])

    def _rank_state(self, trainer: Any) -> dict[str, Any]:
        return {} if self._resumed is None else _rank_of(self._resumed, trainer)

    def _describe(self, trainer: Any, run: Takeover) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "seed": run.settings.seed,
            "fit": run.fit,
            "settings": run.settings.as_record(),
            "world_size": trainer.world_size,
            "place": asdict(find_place(trainer)),
        }

    def _capture(self, trainer: Any, run: Takeover, testimony: Testimony) -> dict[str, Any]:
        return {
            **pieces.capture(trainer, run.capture_rng()),
            "samplers": run.capture_samplers(within=find_place(trainer).moment != "epoch"),
            "ledger": testimony.standing,
            "testimony": testimony.pending,
        }

    def _gather(self, trainer: Any, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the states of all ranks; a rank that does not save gets its own only."""
        if trainer.world_size == 1:
            return [mine]
        buffer = io.BytesIO()
        torch.save(mine, buffer)
        data = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
        gather = ranks_of(trainer).gather
        assert gather is not None, "several ranks talk"
        sizes = [row[0] for row in gather([len(data)])]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(data)] = data
        strategy = trainer.strategy
        gathered = strategy.all_gather(padded.to(strategy.root_device))
        if not trainer.is_global_zero:
            return [mine]
        rows = gathered.cpu().reshape(len(sizes), -1)
        return [
            torch.load(io.BytesIO(row[:size].numpy().tobytes()), weights_only=True)
            for row, size in zip(rows, sizes, strict=True)
        ]

    def _complain(self, trainer: Any, problems: list[str]) -> None:
        self._reasons += problems
        listed = "\n".join(f"- {problem}" for problem in problems)
        text = (
            f"This run cannot go on exactly where the checkpoint was saved:\n{listed}\n"
            "To go on all the same, with a break that the ledger records, pass "
            'DeterminismCallback(on_inexact_resume="warn").'
        )
        if self._on_inexact == "raise":
            raise InexactResumeError(text, reasons=problems)
        if trainer.is_global_zero:
            warn(text, stacklevel=2)


def _is_untrained(state: object) -> bool:
    """Whether a checkpoint was saved before training began: as a search for the learning rate does.

    No ledger was open then, and nothing has been drawn that an epoch does not seed.
    """
    if not isinstance(state, Mapping) or state.get("format") != FORMAT:
        return False
    return all(rank.get("ledger") is None for rank in state["ranks"])


def _iterates_again(trainer: Any) -> bool:
    """Return whether Lightning is about to iterate the loaders of an epoch, for the second time.

    It has done so when it loaded them, if that was for this epoch: workers have begun.
    """
    fit = trainer.fit_loop
    resumes = getattr(fit, "is_resuming", False) or fit.epoch_loop.restarting
    return trainer.current_epoch > 0 and not resumes


def _has_loaded(trainer: Any) -> bool:
    return bool(trainer.fit_loop._loaded_from_state_dict)


def _rank_of(state: Mapping[str, Any], trainer: Any) -> dict[str, Any]:
    """Return what a checkpoint holds of this rank; nothing where ranks are others."""
    ranks = state["ranks"]
    if _other_world(state, trainer):
        return {}
    rank: dict[str, Any] = ranks[trainer.global_rank] if trainer.global_rank < len(ranks) else {}
    return rank


def _other_world(state: Mapping[str, Any], trainer: Any) -> bool:
    return bool(state["world_size"] != trainer.world_size)


def _find_problems(state: object, trainer: Any, run: Takeover) -> list[str]:
    """Return why a run cannot be resumed exactly, one sentence each."""
    if not isinstance(state, Mapping):
        return [
            "The checkpoint holds no state of lightning_d9m: DeterminismCallback was not there."
        ]
    if state.get("format") != FORMAT:
        found = state.get("format")
        return [f"The checkpoint's state has format {found!r}; this version reads {FORMAT}."]
    problems = []
    actual = run.settings.as_record()
    for name, expected in state["settings"].items():
        if actual.get(name) != expected and name in _DRAWN:
            problems.append(
                f"It was saved with {name}={expected!r}; now it is {actual.get(name)!r}."
            )
    if _other_world(state, trainer):
        problems.append(
            f"It was saved by {state['world_size']} ranks; now there are {trainer.world_size}, "
            "which see other data."
        )
    place = state["place"]
    if place["moment"] == "within":
        problems.append(
            f"It was saved while batch {place['batch']} of epoch {place['epoch']} was trained, so "
            "that what the batch had changed by then is in it, and is done again."
        )
    return problems


# What decides which numbers are drawn. (Other settings change speed, or are told by the ledger.)
_DRAWN = ("seed", "per_sample_rng")


def _seal_when_saved(trainer: Any) -> None:
    """Seal the checkpoint when it is written: until then others may change it."""
    strategy = trainer.strategy
    if is_sharded(strategy) or "save_checkpoint" in vars(strategy):
        return
    original = strategy.save_checkpoint

    def save_checkpoint(checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        del strategy.save_checkpoint
        state = checkpoint.get(KEY)
        if state is not None and trainer.is_global_zero:
            state["seal"] = make_seal(checkpoint)
        return original(checkpoint, *args, **kwargs)

    strategy.save_checkpoint = save_checkpoint
