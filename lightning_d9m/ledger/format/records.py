"""The records of a ledger, each described once: ``Entry`` reads, checks and writes them.

Unknown fields are kept in ``extra`` and unknown kinds in ``Opaque``. Both are compared like known
ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, TypeAlias, cast, get_args

from lightning_d9m.errors import DriftError
from lightning_d9m.ledger.format import fields as types
from lightning_d9m.ledger.format.entry import Entry, Mark, part_of, read_entry
from lightning_d9m.ledger.format.fields import MAX_NAME, FieldError, Json, ProbeKey, Scalar
from lightning_d9m.text import quote

SCHEMA = 2
MAX_RANKS = 65_536
# Most batches in one record of probes, and most growth from batch to batch.
MAX_GROUP = 2**16 - 1
MAX_GROWTH = 255

Text: TypeAlias = Annotated[str, types.TEXT]
Whole: TypeAlias = Annotated[int, types.WHOLE]
WholeOrNone: TypeAlias = Annotated[int | None, types.optional(types.WHOLE)]
Scalars: TypeAlias = Annotated[Mapping[str, Scalar], types.SCALARS]
HexFloats: TypeAlias = Annotated[Mapping[str, str], types.HEX_FLOATS]
Growth: TypeAlias = Annotated[int, types.whole(high=MAX_GROWTH)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Header(Entry):
    """The first record of a rank's file: the origin of the digests.

    Attributes:
        schema: Version of this format.
        package: Version of lightning_d9m.
        rank: The rank that writes the file, below ``world_size``.
        world_size: Number of ranks.
        fit: Ordinal of the fit within its process, from 0.
        seed: The base seed.
        created: Time of writing, ISO 8601 in UTC.
        program: Command, git commit, and whether the source differs from it. See
            ``ledger.program``.
        settings: Settings of the session, flat.
        stack: Everything that bit-exactness may depend on, flat; see ``ledger.stack``.
        extra: Fields that this version does not know.
    """

    kind: ClassVar[str] = "header"
    schema: Annotated[int, types.whole(low=1), Mark.REQUIRED] = SCHEMA
    package: Annotated[Text, Mark.INFORMATIONAL]
    rank: Annotated[int, types.whole(high=MAX_RANKS - 1)]
    world_size: Annotated[int, types.whole(low=1, high=MAX_RANKS)]
    fit: Whole
    seed: Whole
    created: Annotated[Text, Mark.INFORMATIONAL]
    program: Annotated[Scalars, Mark.OMITTED, Mark.INFORMATIONAL] = field(default_factory=dict)
    settings: Scalars
    stack: Scalars
    extra: Mapping[str, Json] = field(default_factory=dict)

    def check(self) -> None:
        """Raise a ``FieldError`` unless the rank is one of the ranks."""
        types.whole(high=self.world_size - 1).read("rank", self.rank)


@dataclass(frozen=True, slots=True)
class LoaderFacts(Entry):
    """The size of a training dataloader; None where it is unknown, as of an iterable dataset.

    Attributes:
        samples: Number of samples of the dataset.
        batch_size: Number of samples in a batch.
        batches: Number of batches in an epoch.
        extra: Fields that this version does not know.
    """

    samples: WholeOrNone
    batch_size: WholeOrNone
    batches: WholeOrNone
    extra: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts(Entry):
    """The model, data and arithmetic: two runs that differ here are not comparable.

    Attributes:
        model: Digest of the model's names, shapes and dtypes.
        parameters: Number of scalars in all parameters.
        train: One entry for each training dataloader.
        trainer: Settings of the Trainer that change the arithmetic (precision, accumulation, ...).
        extra: Fields that this version does not know.
    """

    kind: ClassVar[str] = "run"
    model: Text
    parameters: Whole
    train: Annotated[Sequence[LoaderFacts], types.list_of(part_of(LoaderFacts), "LoaderFacts")]
    trainer: Scalars = field(default_factory=dict)
    extra: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Digests(Entry):
    """Digests of one moment of the training.

    Attributes:
        moment: ``"initial"``, ``"epoch"``, ``"final"``, or one that a later version adds.
        epoch: Counted from 0; of ``"final"``, the last epoch that was trained.
        step: The global step.
        totals: One digest for each group.
        groups: Digest by name, by group; a group may be left out and have only its total.
        loss: The last training loss, if there was one.
        scalars: Each logged scalar.
        sketches: Sketch by name of a weight, see ``hashing.sketches``.
        extra: Fields that this version does not know.
    """

    kind: ClassVar[str] = "digests"
    moment: Text
    epoch: Whole
    step: Whole
    totals: Annotated[Mapping[str, str], types.DIGESTS]
    groups: Annotated[
        Mapping[str, Mapping[str, str]], types.table_of(types.DIGESTS, "objects of digests")
    ]
    loss: Annotated[str | None, types.optional(types.HEX_FLOAT)] = None
    scalars: HexFloats = field(default_factory=dict)
    sketches: Annotated[
        Mapping[str, str],
        types.SKETCHES,
        Mark.OMITTED,
        Mark.INFORMATIONAL,
    ] = field(default_factory=dict, compare=False)
    extra: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation(Entry):
    """A validation, a test or a prediction.

    Attributes:
        name: ``"validate"``, ``"test"``, ``"predict"``, or one that a later version adds.
        epoch: Counted from 0.
        step: The global step.
        batches: Number of batches, over all dataloaders.
        outputs: One digest of the outputs of all batches, in order.
        undigested: Number of batches whose outputs have no digest.
        problem: Why the first of them has none.
        scalars: Each logged scalar.
        extra: Fields that this version does not know.
    """

    kind: ClassVar[str] = "evaluation"
    name: Text
    epoch: Whole
    step: Whole
    batches: Whole
    outputs: Annotated[str, types.DIGEST]
    undigested: Annotated[Whole, Mark.OMITTED] = 0
    problem: Annotated[str | None, types.optional(types.text(cut=True)), Mark.OMITTED] = None
    scalars: HexFloats = field(default_factory=dict)
    extra: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayDrift(Entry):
    """The difference between two runs of one training step from the same state.

    Attributes:
        epoch: Counted from 0.
        step: The global step.
        batch: Index of the batch within the epoch.
        place: ``[kind, name, call]``: the first place that differs, in order of execution.
        expected: The digest there in the first run of the step; null if that lacks the place.
        actual: The digest in the second run.
        count: Number of places that differ.
        total: Number of places that were compared.
        extra: Fields that this version does not know.
    """

    kind: ClassVar[str] = "replay"
    epoch: Whole
    step: Whole
    batch: Whole
    place: Annotated[ProbeKey, types.PLACE]
    expected: Annotated[str | None, types.optional(types.DIGEST)]
    actual: Annotated[str | None, types.optional(types.DIGEST)]
    count: Whole
    total: Whole
    extra: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDrift(Entry):
    """The difference between ranks that ended a fit.

    Attributes:
        moment: The moment of the digests that differ.
        epoch: Counted from 0.
        step: The global step.
        rank: The first rank that differs.
        group: The group of its entries that differ, such as ``"weights"``.
        name: The first of these entries.
        extra: Fields that this version does not know.
    """

    moment: Text
    epoch: Whole
    step: Whole
    rank: Annotated[int, types.whole(high=MAX_RANKS)]
    group: Text
    name: Annotated[str, types.text(cut=True)]
    extra: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class End(Entry):
    """The last record of a fit that finished or failed; a killed fit has none.

    Attributes:
        status: The outcome.
        error: The error's message.
        drift: The difference between ranks, if that is the error.
        extra: Fields that this version does not know.
    """

    kind: ClassVar[str] = "end"
    status: Annotated[str, types.matching("finished|failed", "'finished' or 'failed'")]
    error: Annotated[
        str | None, types.optional(types.text(cut=True)), Mark.OMITTED, Mark.INFORMATIONAL
    ] = None
    drift: Annotated[RankDrift | None, part_of(RankDrift), Mark.OMITTED, Mark.INFORMATIONAL] = None
    extra: Mapping[str, Json] = field(default_factory=dict)

    @classmethod
    def failed(cls, error: BaseException) -> "End":
        """Return the end of a fit that raised an error."""
        drift = None
        if isinstance(error, DriftError) and error.expected_rank is not None:
            drift = RankDrift(
                moment=error.moment,
                epoch=error.epoch,
                step=error.step,
                rank=error.rank,
                group=error.group,
                name=error.names[0],
            )
        return cls(status="failed", error=f"{type(error).__name__}: {error}", drift=drift)


@dataclass(frozen=True, slots=True)
class ProbeLayout(Entry):
    """The places of probes; later records refer to it by number.

    Attributes:
        id: Its number, valid until a later layout has the same one.
        places: ``[kind, name, call]`` in order of execution; call = how often this kind and name
            occurred before within the batch.
    """

    kind: ClassVar[str] = "layout"
    id: Whole
    places: Annotated[tuple[ProbeKey, ...], types.PLACES]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbesRecord(Entry):
    """Digests at the places of consecutive batches, or of a part of one batch.

    Ledgers of schema 1 have them among the records. Later ones have frames instead, which the
    writer makes of this record; its digests are then bytes.

    Attributes:
        epoch: Counted from 0.
        step: The global step when the first batch began.
        batch: Index of the first batch within the epoch.
        layout: Number of the layout that names the places.
        digests: The digests, batch after batch.
        count: Number of batches.
        steps: Growth of the step from batch to batch.
        batches: Growth of the index.
    """

    kind: ClassVar[str] = "probes"
    epoch: Whole
    step: Whole
    batch: Whole
    layout: Whole
    digests: Annotated[bytes, types.PACKED_DIGESTS]
    count: Annotated[int, types.whole(low=1, high=MAX_GROUP)] = 1
    steps: Growth = 1
    batches: Growth = 1


@dataclass(frozen=True, slots=True)
class FramesEnd(Entry):
    """The end of the digests of probes that precede the next record, in the file of frames.

    Attributes:
        bytes: The size of the file.
        last: The check of its last block.
    """

    kind: ClassVar[str] = "frames"
    bytes: Whole
    last: Annotated[str, types.HEX64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume(Entry):
    """The ledger that a resumed run continues.

    Attributes:
        parent: The continued folder, as it was named.
        parent_check: The chain hash of its last record when the checkpoint was saved.
        epoch: The epoch that was next or under way.
        step: The global step.
        batch: How many batches of the epoch were trained.
        inexact: Why the resumed run cannot end at the bits of an uninterrupted one.
        extra: Fields that this version does not know.
    """

    kind: ClassVar[str] = "resume"
    parent: Text
    parent_check: Annotated[str, types.CHECK_OR_EMPTY]
    epoch: Whole
    step: Whole
    batch: Whole
    inexact: Annotated[
        Sequence[str], types.list_of(types.text(cut=True), "short texts"), Mark.OMITTED
    ] = ()
    extra: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Opaque:
    """A record of an unknown kind, compared field by field."""

    kind: str
    fields: Mapping[str, Json]

    def as_record(self) -> dict[str, Json]:
        """Return the record that is written."""
        return {"kind": self.kind, **self.fields}


Record: TypeAlias = (
    Header
    | RunFacts
    | Digests
    | Evaluation
    | ProbeLayout
    | ProbesRecord
    | FramesEnd
    | ReplayDrift
    | Resume
    | End
    | Opaque
)
RECORD_TYPES: dict[str, type[Entry]] = {
    entry.kind: cast("type[Entry]", entry) for entry in get_args(Record) if entry is not Opaque
}


def parse_record(fields: Json) -> Record:
    """Check a decoded record and return it as its type.

    Raises:
        FieldError: When a field is missing, has another type, or is out of bounds.
    """
    if not isinstance(fields, dict):
        raise FieldError("kind", f"is missing: the record is {quote(fields)}, not an object")
    kind = fields.get("kind")
    if not isinstance(kind, str) or len(kind) > MAX_NAME:
        found = f"must be a short text, and is {quote(kind)}" if "kind" in fields else "is missing"
        raise FieldError("kind", found)
    if "check" in fields:
        raise FieldError("check", "occurs twice")
    rest = {name: value for name, value in fields.items() if name != "kind"}
    entry = RECORD_TYPES.get(kind)
    return Opaque(kind, rest) if entry is None else cast("Record", read_entry(entry, rest))
