"""The records of a ledger: their schema, and their JSON text.

Each kind of record is a ``msgspec.Struct`` whose annotations say which values a field may have.
Reading, checking, writing and docs/ledger-fields.md follow from these classes. A ledger may come
from an untrusted source: nothing of it is unpickled or executed.

A kind or a field that this version does not know is refused: a later version wrote it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from functools import cache
from hashlib import blake2b
from math import isfinite
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, get_args

from msgspec import Meta, MsgspecError, Struct, field, structs, to_builtins
from msgspec.json import Decoder, Encoder

from lightning_d9m.errors import DriftError
from lightning_d9m.text import quote

SCHEMA = 1
# The limits bound the memory that a file of a stranger can make a reader take.
MAX_RANKS = 65_536
MAX_NAME = 4096
# Readers in other languages have integers of 64 bits.
MAX_WHOLE = 2**63 - 1
# The most places of one layout, so that a record of probes has at most 256 KiB of digests.
MAX_LAYOUT_PLACES = 16_384
MAX_LAYOUTS = 2**16
# A record of 100,000 tensors with long names has 20 MB; the header is a few kB.
MAX_LINE = 64 * 2**20
MAX_HEADER = 2**20
DIGEST_DIGITS = 32
DIGEST_BYTES = DIGEST_DIGITS // 2

Scalar: TypeAlias = str | int | float | bool | None
Json: TypeAlias = Any
# Kind, name, call: the place of a value within a batch.
ProbeKey: TypeAlias = tuple[str, str, int]


# docs/ledger-fields.md names the values of a field by its type, or by its description.
Text: TypeAlias = Annotated[str, Meta(max_length=MAX_NAME)]
Whole: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_WHOLE)]
Rank: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_RANKS - 1)]
Digest: TypeAlias = Annotated[
    str,
    Meta(
        pattern=rf"\A[0-9a-f]{{{DIGEST_DIGITS}}}\Z",
        description=f"{DIGEST_DIGITS} lowercase hex digits",
    ),
]
HexFloat: TypeAlias = Annotated[Text, Meta(description="a text that float.hex() gives")]
Digests32: TypeAlias = Mapping[Text, Digest]
Hashes: TypeAlias = Mapping[
    Text, Annotated[str, Meta(min_length=64, max_length=64, description="64 hex digits")]
]
Scalars: TypeAlias = Mapping[Text, Text | int | float | bool | None]
Place: TypeAlias = tuple[Text, Text, Whole]


_UNCOMPARED = "uncompared"


def _uncompared(why: str) -> Meta:
    """Mark a field that the comparison of two ledgers leaves out; it compares every other one."""
    return Meta(extra={_UNCOMPARED: why})


# At the field, so that a new one is compared unless its author says why not, and the page of fields
# and every comparison follow.
_NEVER = _uncompared("never compared")
# Counterparts are equal in these.
_PAIRS = _uncompared("pairs records")


def _check_floats(field: str, texts: Iterable[str | None]) -> None:
    """Check that each text is what ``float.hex`` gives, so that equal texts mean equal bits."""
    for text in texts:
        try:
            known = text if text is None else float.fromhex(text).hex()
        except (OverflowError, ValueError):
            known = ""
        if known != text:
            raise ValueError(f"`{field}` has {quote(text)}, which float.hex() does not give")


def _name_floats(table: Mapping[str, Scalar]) -> Mapping[str, Scalar]:
    """Return a table in which infinities and NaN, which JSON does not have, are texts."""
    return {
        name: repr(value) if isinstance(value, float) and not isfinite(value) else value
        for name, value in table.items()
    }


class FieldError(ValueError):
    """A field of a record is missing or has a value that the schema does not allow."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"field {quote(field)} {problem}")


class RecordPart(Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a record. Fields are written in the order of the class.

    Attributes:
        cut: Fields whose text, or each of whose texts, is cut to ``MAX_NAME`` characters.
    """

    cut: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        # Cut here and not refused: an error's message may have any length, and the record that ends
        # a ledger must be written.
        for name in self.cut:
            value = getattr(self, name)
            shorter = value and value[:MAX_NAME]
            if isinstance(value, list | tuple):
                shorter = tuple(text[:MAX_NAME] for text in value)
            structs.force_setattr(self, name, shorter)


# Without defaults, which most fields have: a run with probes writes a record for each batch.
class Entry(RecordPart, frozen=True, tag_field="kind", omit_defaults=True):
    """A record. Fields that have their default are left out."""

    @property
    def kind(self) -> str:
        """The name with which the record begins."""
        return str(self.__struct_config__.tag)

    def as_record(self) -> dict[str, Json]:
        """Return what is written, JSON values by name."""
        # Lists, as JSON gives them back: a tuple would differ from what a reader returns.
        plain: dict[str, Json] = to_builtins(self, builtin_types=(bytes,), enc_hook=_to_plain)
        return {
            name: [*value] if isinstance(value, tuple) else value for name, value in plain.items()
        }


@cache
def find_uncompared(entry: type[RecordPart]) -> Mapping[str, str]:
    """Return the fields of a record that the comparison of two ledgers leaves out, and why."""
    return {
        part.name: meta.extra[_UNCOMPARED]
        for part in structs.fields(entry)
        for meta in get_args(part.type)
        if isinstance(meta, Meta) and meta.extra
    }


def list_compared(entry: type[RecordPart]) -> list[str]:
    """Return the fields of a record that are compared, in order."""
    return [name for name in entry.__struct_fields__ if name not in find_uncompared(entry)]


def _to_plain(value: object) -> Json:
    """Return a mapping or the value of a subclass as the JSON type."""
    if isinstance(value, Mapping):
        return dict(value)
    for base in (str, int, float):
        if isinstance(value, base):
            return base(value)
    raise TypeError(f"Values of {type(value).__qualname__} have no JSON text")


class Header(Entry, frozen=True, tag="header", kw_only=True):
    """The first record of a rank's file: the origin of the digests.

    Attributes:
        schema: Version of this format.
        package: Version of lightning_d9m.
        rank: The rank that writes the file, below ``world_size``.
        world_size: Number of ranks.
        fit: Ordinal of the fit within its process, from 0.
        seed: The base seed.
        created: Time of writing, ISO 8601 in UTC.
        program: Command, git commit, whether the source differs from it; see ``ledger.command``.
            The last calls that seeded torch's generators before the fit.
        settings: Settings of the session, flat.
        stack: Everything that bit-exactness may depend on, flat; see ``ledger.stack``.
    """

    # A default that a factory makes is always written, unlike one that is a value.
    schema: Annotated[Whole, _PAIRS] = field(default_factory=lambda: SCHEMA)
    package: Annotated[Text, _NEVER]
    rank: Annotated[Rank, _PAIRS]
    world_size: Annotated[int, Meta(ge=1, le=MAX_RANKS)]
    fit: Whole
    seed: Whole
    created: Annotated[Text, _NEVER]
    program: Annotated[Scalars, _NEVER] = {}
    settings: Scalars
    stack: Scalars

    # msgspec reports a `ValueError` of `__post_init__` as an error of its decoder.
    def __post_init__(self) -> None:
        if self.rank >= self.world_size:
            raise ValueError(f"rank {self.rank} is not below world_size {self.world_size}")
        structs.force_setattr(self, "settings", _name_floats(self.settings))


class LoaderFacts(RecordPart, frozen=True):
    """The size of a training dataloader; None where it is unknown, as of an iterable dataset.

    Attributes:
        samples: Number of samples of the dataset.
        batch_size: Number of samples in a batch.
        batches: Number of batches in an epoch.
    """

    samples: Whole | None
    batch_size: Whole | None
    batches: Whole | None


class RunFacts(Entry, frozen=True, tag="run", kw_only=True):
    """The model, data and arithmetic: two runs that differ here are not comparable.

    Attributes:
        model: Digest of the model's names, shapes and dtypes.
        parameters: Number of scalars in all parameters.
        train: One entry for each training dataloader.
        trainer: Settings of the Trainer that change the arithmetic (precision, accumulation, ...).
    """

    model: Text
    parameters: Whole
    train: tuple[LoaderFacts, ...]
    trainer: Scalars = {}

    def __post_init__(self) -> None:
        structs.force_setattr(self, "trainer", _name_floats(self.trainer))


class Digests(Entry, frozen=True, tag="digests", kw_only=True):
    """Digests of one moment of the training.

    Attributes:
        moment: ``"initial"``, ``"epoch"``, ``"final"``, ``"exception"`` (where one ended the fit),
            or one that a later version adds.
        epoch: Counted from 0; of ``"final"``, the last epoch that was trained.
        step: The global step.
        totals: One digest for each group.
        groups: Digest by name, by group; a group may be left out and have only its total.
        undigested: Number of objects in the state that count by their type alone, because their
            bytes are not defined.
        problem: Where the first of them is, and why it has no digest.
        loss: The last training loss, if there was one.
        scalars: Each logged scalar.
    """

    cut: ClassVar[tuple[str, ...]] = ("problem",)
    moment: Annotated[Text, _PAIRS]
    epoch: Annotated[Whole, _PAIRS]
    step: Whole
    totals: Digests32
    groups: Mapping[Text, Digests32]
    undigested: Annotated[Whole, _NEVER] = 0
    problem: Annotated[Text | None, _NEVER] = None
    loss: HexFloat | None = None
    scalars: Mapping[Text, HexFloat] = {}

    def list_values(self) -> dict[str, float]:
        """Return the loss, if there was one, and the logged scalars."""
        written = ({} if self.loss is None else {"loss": self.loss}) | dict(self.scalars)
        return {name: float.fromhex(text) for name, text in written.items()}

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_floats("loss", [self.loss])
        _check_floats("scalars", self.scalars.values())


class Evaluation(Entry, frozen=True, tag="evaluation", kw_only=True):
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
    """

    cut: ClassVar[tuple[str, ...]] = ("problem",)
    name: Text
    epoch: Whole
    step: Whole
    batches: Whole
    outputs: Digest
    undigested: Whole = 0
    # A key in it may show an address, which is another one in each run.
    problem: Annotated[Text | None, _NEVER] = None
    scalars: Mapping[Text, HexFloat] = {}

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_floats("scalars", self.scalars.values())


class RankDrift(RecordPart, frozen=True, kw_only=True):
    """The difference between ranks that ended a fit.

    Attributes:
        moment: The moment of the digests that differ.
        epoch: Counted from 0.
        step: The global step.
        rank: The first rank that differs.
        group: The group of its entries that differ, such as ``"weights"``.
        name: The first of these entries.
    """

    cut: ClassVar[tuple[str, ...]] = ("name",)
    moment: Text
    epoch: Whole
    step: Whole
    rank: Rank
    group: Text
    name: Text


class End(Entry, frozen=True, tag="end", kw_only=True):
    """The last record of a fit that finished, failed or was stopped; a killed fit has none.

    Attributes:
        status: The outcome; ``"stopped"`` of a segment that was ended before its fit ended.
        epoch: The epoch of the last state that the fit has recorded, or that an exception ended.
        step: The global step there.
        error: The error's message.
        drift: The difference between ranks, if that is the error.
        reason: What ended a training that finished, where it is known.
    """

    cut: ClassVar[tuple[str, ...]] = ("error", "reason")
    status: Literal["finished", "failed", "stopped"]
    epoch: Whole = field(default_factory=int)
    step: Whole = field(default_factory=int)
    error: Annotated[Text | None, _NEVER] = None
    drift: Annotated[RankDrift | None, _NEVER] = None
    reason: Annotated[Text | None, _NEVER] = None

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


class ProbeLayout(Entry, frozen=True, tag="layout"):
    """The places of probes; later records refer to it by number.

    Attributes:
        id: Its number, valid until a later layout has the same one.
        places: ``[kind, name, call]`` in order of execution; call = how often this kind and name
            occurred before within the batch.
    """

    id: Annotated[int, Meta(ge=0, le=MAX_LAYOUTS - 1)]
    places: Annotated[tuple[Place, ...], Meta(min_length=1, max_length=MAX_LAYOUT_PLACES)]

    def __post_init__(self) -> None:
        if len(set(self.places)) < len(self.places):
            raise ValueError("`places` has a place twice")


class ProbesRecord(Entry, frozen=True, tag="probes", kw_only=True):
    """Digests at the places of a batch, or of a part of one.

    Attributes:
        epoch: Counted from 0.
        step: The global step when the batch began.
        batch: Index of the batch within the epoch.
        layout: Number of the layout that names the places.
        digests: The digests in order of execution.
        problem: Where the first value of the batch is that counts by its type alone, at least in
            part, and why it has no digest.
    """

    cut: ClassVar[tuple[str, ...]] = ("problem",)
    epoch: Whole
    step: Whole
    batch: Whole
    layout: Whole
    digests: Annotated[bytes, Meta(min_length=DIGEST_BYTES)]
    problem: Annotated[Text | None, _NEVER] = None

    def check_places(self, places: int) -> None:
        """Raise a ``FieldError`` unless the digests fit the number of places of the layout."""
        if not places:
            raise FieldError("layout", f"is {self.layout}, and no record before it says what it is")
        if len(self.digests) != places * DIGEST_BYTES:
            raise FieldError(
                "digests",
                f"must be {places} digests of {DIGEST_BYTES} bytes, one for each place of its "
                f"layout, and has {len(self.digests)} bytes",
            )


class StepDigests(Entry, frozen=True, tag="step", kw_only=True):
    """The state after one of the first steps that follow a checkpoint.

    A run that resumes from the checkpoint is compared with it. Two ledgers are compared in those
    that both have, because a run may save more often than another one.

    Attributes:
        epoch: Counted from 0.
        step: The global step after it.
        totals: One digest for each group: those of ``digests``, and ``"generators"``.
        entries: The first 4 bytes of the digest of each entry of a group, sorted by name.
    """

    epoch: Annotated[Whole, _PAIRS]
    step: Annotated[Whole, _PAIRS]
    totals: Digests32
    entries: Annotated[Mapping[Text, bytes], _NEVER]

    def leave_out_generators(self) -> "StepDigests":
        """Return it without them, for a comparison with a run that has those of other devices."""
        totals = {name: total for name, total in self.totals.items() if name != "generators"}
        return structs.replace(self, totals=totals)


class Checkpoint(Entry, frozen=True, tag="checkpoint", kw_only=True):
    """A checkpoint that the run has saved completely.

    A run may save more often than another one, so no comparison of two ledgers reads it.

    Attributes:
        path: The file or folder, relative to the ledger's folder where that is possible.
        epoch: The epoch that is under way, counted from 0.
        step: The global step.
        batch: How many batches of the epoch were trained.
        manifest: The digest of the manifest in it; empty where each rank saves its own part.
    """

    path: Text
    epoch: Whole
    step: Whole
    batch: Whole
    manifest: Text = ""


class Sources(Entry, frozen=True, tag="sources", kw_only=True):
    """The program of a run that commits to it, when the run begins and when it ends; on rank 0.

    ``d9m prove`` and ``d9m check`` read it, and no comparison of two ledgers.

    Attributes:
        program: SHA-256 of each file of the program that is loaded, by its path from the working
            folder.
        named: SHA-256 of each file that the command names.
        packages: The version of each installed package, and the tags of its wheel.
        used: The path of each other package or module that is loaded, from its folder in Python's
            path.
        gaps: Why the run does not commit to a part of the program or its data.
    """

    program: Hashes
    named: Hashes
    packages: Mapping[Text, Text]
    used: tuple[Text, ...]
    gaps: Mapping[Text, Text] = {}


class Resume(Entry, frozen=True, tag="resume", kw_only=True):
    """The ledger that a resumed run continues.

    Attributes:
        parent: The continued folder, as it was named.
        parent_check: The chain hash of its last record when the checkpoint was saved.
        epoch: The epoch that was next or under way.
        step: The global step.
        batch: How many batches of the epoch were trained.
        inexact: Why the resumed run cannot end at the bits of an uninterrupted one.
        unchecked: Why its first steps could not be compared with those that followed the
            checkpoint in the run that saved it; null if they are compared.
    """

    cut: ClassVar[tuple[str, ...]] = ("inexact", "unchecked")
    parent: Text
    parent_check: Annotated[
        str,
        Meta(
            pattern=r"\A(?:[0-9a-f]{16})?\Z",
            description="16 lowercase hex digits, or empty where there is no ledger",
        ),
    ]
    epoch: Whole
    step: Whole
    batch: Whole
    inexact: tuple[Text, ...] = ()
    unchecked: Text | None = None


Record: TypeAlias = (
    Header
    | RunFacts
    | Digests
    | Evaluation
    | ProbeLayout
    | ProbesRecord
    | StepDigests
    | Checkpoint
    | Sources
    | Resume
    | End
)
CHAIN_START = b"0" * 16


@dataclass(slots=True)
class Batch:
    """The digests of the probes of one batch, or of some of its places.

    Attributes:
        epoch: Counted from 0.
        step: The global step when the batch began.
        batch: Index within the epoch.
        layouts: The places of each part, in order of execution.
        digests: The digests in order of execution, 16 bytes each.
        problem: As of ``ProbesRecord``.
    """

    epoch: int
    step: int
    batch: int
    layouts: tuple[tuple[ProbeKey, ...], ...]
    digests: bytes
    problem: str | None = dataclass_field(default=None, compare=False)

    @property
    def size(self) -> int:
        """Number of places."""
        return len(self.digests) // DIGEST_BYTES

    def list_digests(self) -> list[bytes]:
        """Return the digest at each place."""
        data = self.digests
        return [data[at : at + DIGEST_BYTES] for at in range(0, len(data), DIGEST_BYTES)]


# Made once: msgspec compiles the schema of all classes for each decoder.
_encode = Encoder(enc_hook=_to_plain).encode
_decode = Decoder(Record).decode


def chain_record(body: bytes, previous: bytes) -> tuple[bytes, bytes]:
    """Return (line, chain hash) of a record's JSON, given the chain hash before it."""
    # The hash covers the bytes of the line and not its values, so a reader need not write JSON as
    # this encoder does to verify a file. It stands last, where it can be cut off by its length.
    head = body[:-1]
    chain_hash = blake2b(previous + head, digest_size=8).hexdigest().encode()
    return b'%b,"check":"%b"}\n' % (head, chain_hash), chain_hash


def encode_record(record: Record) -> bytes:
    """Return the JSON text of one record: compact, the kind first, without its chain hash.

    Raises:
        FieldError: When the record is not one that ``decode_record`` would accept.
    """
    try:
        try:
            body = _encode(record)
        except UnicodeEncodeError:  # rare
            body = _encode(_escape_surrogates(record.as_record()))
    except TypeError as error:
        raise FieldError("record", f"cannot be written as JSON: {error}") from error
    # msgspec checks types only when it decodes. A line that readers refuse would make the rest of
    # the file unreadable, so it is refused here.
    decode_record(body)
    return body


def _escape_surrogates(value: Json) -> Json:
    """Return a value whose texts have a UTF-8 encoding, unlike the name of a file in Latin-1."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_escape_surrogates(key): _escape_surrogates(own) for key, own in value.items()}
    return [*map(_escape_surrogates, value)] if isinstance(value, list | tuple) else value


def decode_record(body: bytes) -> Record:
    """Parse the JSON text of one record, without its chain hash.

    Raises:
        FieldError: When it is not JSON, or not a record of the schema.
    """
    try:
        record: Record = _decode(body)
    except (MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _field_error(error) from error
    return record


def _field_error(error: Exception) -> FieldError:
    # msgspec has the path only in its message: "Expected `int`, got `str` - at `$.stack[...]`".
    problem, _, path = str(error).partition(" - at ")
    name = path.replace("`", "").removeprefix("key in ").removeprefix("$").removeprefix(".")
    return FieldError(name or "record", f"does not fit: {problem}")
