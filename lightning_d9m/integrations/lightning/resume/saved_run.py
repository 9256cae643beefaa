"""The state of a run in a checkpoint: a dict by part, in which each rank has a dict by part, too.

It has plain values and tensors, which ``torch.load(weights_only=True)`` reads.
"""

from collections.abc import Collection, Mapping
from typing import Any

from msgspec import ValidationError, convert, defstruct

from lightning_d9m.engine.state.plain_data import decode_plain, encode_plain
from lightning_d9m.errors import CheckpointError
from lightning_d9m.integrations.lightning.resume import (
    loaders,
    logged,
    optimizers,
    position,
    program,
    run_facts,
)
from lightning_d9m.integrations.lightning.resume.part import Part
from lightning_d9m.integrations.lightning.saved_state import MANIFEST_KEY, find_state
from lightning_d9m.integrations.trainer.trainer_attributes import (
    Trainer,
    get_logical_ranks,
    ranks_of,
)

FORMAT = 3

# They are captured and restored in this order. The program comes first among what it may hold: a
# metric is then reset, a generator then set. The generators of training come last, because what
# restores the others may draw. The last two collect what all others note.
PARTS: tuple[type[Part], ...] = (
    *(run_facts.SavedSettings, position.Position, position.Limits, position.Stopped),
    *(
        optimizers.Groups,
        optimizers.Frozen,
        optimizers.Buffers,
        run_facts.SavedLedger,
        run_facts.Pending,
    ),
    *(logged.CallbackMetrics, optimizers.Schedulers, program.Program, logged.Reset),
    *(logged.Results, loaders.Generators, logged.LogicalRanks),
    *(optimizers.Gradients, loaders.Samplers, loaders.Reloads, loaders.BatchSizes, loaders.Rng),
    *(run_facts.Inexact, run_facts.Unknown),
)
# They hold the whole state in almost every training, so that ranks wait for each other once.
_FIRST_BYTES = 64 * 2**10

# The types of the stored form, which `convert` compares a checkpoint with.
_FORMS = [
    [(part.name, part.form) for part in PARTS if (part.scope == "rank") is own]
    for own in (True, False)
]
_list: Any = list
SavedRank: Any = defstruct("SavedRank", _FORMS[0], forbid_unknown_fields=True, frozen=True)
SavedRun: Any = defstruct(
    "SavedRun",
    [("format", int), *_FORMS[1], ("ranks", _list[SavedRank])],
    forbid_unknown_fields=True,
    frozen=True,
)


def read_state(checkpoint: Mapping[str, Any]) -> Any:
    """Read the state from a checkpoint.

    Returns:
        A ``SavedRun``; or a sentence that says why there is none that this version reads.

    Raises:
        CheckpointError: If it lacks a part, has others, or values of other types.
    """
    state = find_state(checkpoint)
    if not isinstance(state, Mapping):
        return (
            "The checkpoint has no lightning_d9m state: it was saved without DeterminismCallback."
        )
    found = state.get("format")
    if found != FORMAT:
        return (
            f"The checkpoint's state has format {found!r}; this version reads {FORMAT}. Resume "
            "with the version of lightning_d9m that saved it."
        )
    try:
        return convert({name: state[name] for name in state if name != MANIFEST_KEY}, SavedRun)
    except ValidationError as error:
        raise CheckpointError(
            f"The lightning_d9m state of the checkpoint is damaged: {error}. Take another copy "
            "of the checkpoint, or an earlier one."
        ) from error


def gather(trainer: Trainer, captured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of the run from that of each rank, on rank 0; every rank calls this.

    Another rank returns its own.
    """
    states = [{part.name: captured[part.name] for part in PARTS if part.scope != "run"}]
    if trainer.world_size > 1:
        rows = ranks_of(trainer).gather_bytes(
            encode_plain(states[0]), first=_FIRST_BYTES, on_first_rank=True
        )
        if trainer.is_global_zero:
            own = trainer.global_rank
            states = [states[0] if n == own else decode_plain(row) for n, row in enumerate(rows)]
    run = {part.name: captured[part.name] for part in PARTS if part.scope == "run"}
    for name in (part.name for part in PARTS if part.scope == "joined"):
        run[name] = [*dict.fromkeys(entry for state in states for entry in state.pop(name))]
    return {"format": FORMAT, **run, "ranks": states}


def select(parts: Collection[Part], saved: Any, trainer: Trainer) -> dict[str, Any]:
    """Return the state of each part for this rank, from a ``SavedRun``.

    The parts of a rank are left out if it gets other data. With logical ranks it gets the same on
    any number of processes.
    """
    logical, rank = get_logical_ranks(trainer), trainer.global_rank
    found = {part.name: getattr(saved, part.name) for part in parts if part.scope != "rank"}
    same = saved.settings.get(run_facts.LOGICAL_RANKS) == logical
    if logical is None:
        same = (
            same
            and saved.settings.get(run_facts.RANKS) == trainer.world_size
            and rank < len(saved.ranks)
        )
    for part in parts if same else ():
        if part.scope == "rank":
            states = [getattr(own, part.name) for own in saved.ranks]
            found[part.name] = states[rank] if logical is None else part.select(states, rank)
    return found
