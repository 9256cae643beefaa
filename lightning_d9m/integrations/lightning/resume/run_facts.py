"""Facts of the run that saved a checkpoint: its settings, its ledger, and what is not exact."""

from collections.abc import Iterable
from fnmatch import fnmatch
from typing import Any

from lightning_d9m.engine.hashing.shards import find_hybrid_sharding
from lightning_d9m.engine.recording.resume_check import can_be_checked
from lightning_d9m.integrations.lightning.resume.part import Part, Phase
from lightning_d9m.integrations.lightning.resume.position import reaches_max_steps
from lightning_d9m.integrations.trainer.packages import rank_zero
from lightning_d9m.integrations.trainer.trainer_attributes import get_logical_ranks

FIT, RANKS, LOGICAL_RANKS = "fit", "world_size", "logical_ranks"
"""Keys among the settings: the ordinal of the fit in its process, and the numbers of ranks."""

# The settings that select the random streams, the data or how sums are rounded, and what follows if
# they differ. (The others change speed, or are in the ledger.)
_COMPARED = {
    "seed": "",
    "per_sample_rng": "",
    LOGICAL_RANKS: ", so the ranks get different data",
    RANKS: ", so the ranks get different data",
    "threads": ", which round differently: pass DeterminismCallback(threads=...)",
}
_UNKNOWN = (
    "Nothing can read {0}, so it may change in the fit unseen, and the resumed run cannot be "
    "compared with the steps after the checkpoint. Keep its position in a number; or if the "
    "training does not depend on it, pass DeterminismCallback(accepted_unknown={0!r})."
)
_CHECKED = (
    "Nothing can read {}. The first steps of the resumed run are compared with those of the run "
    "that saved the checkpoint."
)


class SavedSettings(Part):
    """The settings of the run, which select its random streams."""

    name, scope, checked = "settings", "run", "load"

    def capture(self, _phase: Phase) -> dict[str, Any]:
        session, trainer = self.fit.session, self.trainer
        ranks = {RANKS: trainer.world_size, LOGICAL_RANKS: get_logical_ranks(trainer)}
        return {**session.settings.as_record(), FIT: session.fit, **ranks}

    def problems(self, state: dict[str, Any]) -> list[str]:
        now = self.capture("epoch")
        # With logical ranks the data are the same on any number of processes, and threads round.
        skipped = "threads" if state.get(LOGICAL_RANKS) is None else RANKS
        found = [
            f"It was saved with {name}={state.get(name)!r}; now it is {now.get(name)!r}{effect}."
            for name, effect in _COMPARED.items()
            if name != skipped and state.get(name) != now.get(name)
        ]
        return [*found, *filter(None, [find_hybrid_sharding([self.trainer.strategy])])]


class SavedLedger(Part):
    """The folder of the ledger, and the check of the rank's last record; None if none was open."""

    name, form = "ledger", dict[str, str] | None

    def capture(self, _phase: Phase) -> dict[str, str] | None:
        return self.fit.recorder.run.ledger_position

    def select(self, states: list[Any], rank: int) -> Any:
        return states[rank if rank < len(states) else 0]


class Pending(Part):
    """Parts of the next record: the last loss, as ``float.hex()``, and the data."""

    name = "pending"

    def capture(self, _phase: Phase) -> dict[str, Any]:
        run = self.fit.recorder.run
        return {"loss": run.loss_text, "data": run.data}


class Inexact(Part):
    """Reasons why the run cannot be resumed exactly. It is captured after all others."""

    name, form, scope, checked = "inexact", list[str], "joined", "load"

    def capture(self, _phase: Phase) -> list[str]:
        return [*self.fit.inexact]

    def problems(self, state: list[str]) -> list[str]:
        # If no step remains, they do not matter.
        return [] if reaches_max_steps(self.trainer, self.fit.saved["position"].step) else state


class Unknown(Inexact):
    """The paths of objects that nothing can read: they may have changed."""

    name = "unknown"

    def capture(self, _phase: Phase) -> list[str]:
        return [*self.fit.unknown]

    def problems(self, state: list[str]) -> list[str]:
        accepted, paths = self.fit.accepted, super().problems(state)
        # A name may have brackets, which are those of a pattern.
        paths = [own for own in paths if not any(fnmatch(own, p) or own == p for p in accepted)]
        # Another rank may lack its ledger, so all ranks ask whether each can be checked.
        if paths and can_be_checked(self.fit.saved.get("ledger"), self.trainer.global_rank):
            rank_zero().rank_zero_info(_CHECKED.format(", ".join(paths)))
            return []
        return [_UNKNOWN.format(path) for path in paths]


def name_all(problem: str, paths: Iterable[str]) -> list[str]:
    """Return a problem with the paths in it; nothing without paths."""
    named = ", ".join(paths)
    return [problem.format(named)] if named else []
