"""The state from which a ``Recorder`` resumes, as plain values."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from lightning_d9m.errors import CheckpointError
from lightning_d9m.ledger.format.records import Resume

_FORMAT = 1


@dataclass(frozen=True)
class SavedLoop:
    """The position of a recorded loop, and what its rest depends on.

    Attributes:
        rank: The rank that saved it.
        world_size: Number of ranks.
        seed: The base seed.
        fit: Ordinal of the fit within its process.
        epoch: The epoch that is next or under way.
        step: The global step.
        batch: Number of batches of the epoch that were given out.
        rng: The state of all generators.
        samplers: The states of the samplers' generators, by number of the loader.
        loss: ``float.hex()`` of the last loss; None without one.
        scalars: The same of each scalar, by name.
        folder: The ledger's folder; empty without one.
        check: The check of its last record.
    """

    rank: int
    world_size: int
    seed: int
    fit: int
    epoch: int
    step: int
    batch: int
    rng: dict[str, Any]
    samplers: dict[str, Any]
    loss: str | None
    scalars: dict[str, str]
    folder: str
    check: str

    def as_plain(self) -> dict[str, Any]:
        """Return plain values, which ``torch.load(weights_only=True)`` reads."""
        return {"format": _FORMAT, **asdict(self)}

    def as_record(self) -> dict[str, Any]:
        """Return the record that names the ledger which a resumed run continues."""
        return Resume(
            parent=self.folder,
            parent_check=self.check,
            epoch=self.epoch,
            step=self.step,
            batch=self.batch,
        ).as_record()

    @classmethod
    def from_plain(cls, state: object) -> "SavedLoop":
        """Read what ``as_plain`` returned.

        Raises:
            CheckpointError: If it is not such a state.
        """
        names = {part.name for part in fields(cls)} | {"format"}
        if not isinstance(state, Mapping) or state.keys() != names or state["format"] != _FORMAT:
            found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise CheckpointError(
                f"The state for Recorder.load_state_dict has {found}, and this version of "
                f"lightning_d9m reads format {_FORMAT} with {sorted(names)}. Pass what "
                "Recorder.state_dict() returned."
            )
        return cls(**{name: value for name, value in state.items() if name != "format"})

    def check_run(self, *, rank: int, world_size: int, seed: int) -> None:
        """Raise a ``CheckpointError`` unless a run may continue from here."""
        for name, actual in (("rank", rank), ("world_size", world_size), ("seed", seed)):
            expected = getattr(self, name)
            if expected != actual:
                raise CheckpointError(
                    f"The saved Recorder has {name} {expected}, and this run has {actual}, so it "
                    "would not end at the same bits. Let each rank load the state that it saved, "
                    "with the same seed and as many ranks."
                )
