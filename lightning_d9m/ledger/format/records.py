"""The records of a ledger: their schema, and their JSON text.

Each kind of record is a ``msgspec.Struct`` whose annotations say which values a field may have.
Reading, checking, writing and docs/ledger-fields.md follow from these classes. A ledger may come
from an untrusted source: nothing of it is unpickled or executed.

Reading loses nothing: a text is accepted only if writing its values again gives the same bytes.
Fields that this version does not know are kept in ``extra``, and unknown kinds in ``Opaque``.
"""

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Annotated, Any, ClassVar, TypeAlias, cast, get_args

from msgspec import Meta, Struct, ValidationError, convert, structs

from lightning_d9m.errors import DriftError
from lightning_d9m.text import quote

SCHEMA = 2
MAX_RANKS = 65_536
MAX_NAME = 4096
MAX_WHOLE = 2**63 - 1
# The most places of one layout, so that a frame has at most 256 KiB.
MAX_LAYOUT_PLACES = 16_384
# Most batches in one record of probes, and most growth from batch to batch.
MAX_GROUP = 2**16 - 1
MAX_GROWTH = 255
# A record of 100,000 tensors with long names has 20 MB; the header is a few kB.
MAX_LINE = 64 * 2**20
MAX_HEADER = 2**20
MAX_DEPTH = 16
# Bounds the memory that parsing one record takes: a JSON value of 3 bytes becomes about 100 bytes.
MAX_ITEMS = 1_000_000
DIGEST_DIGITS = 32
DIGEST_BYTES = DIGEST_DIGITS // 2
# Numbers of a sketch of a weight, and the hex digits of these float64.
SKETCH_BUCKETS = 8
SKETCH_DIGITS = 16 * SKETCH_BUCKETS

Scalar: TypeAlias = str | int | float | bool | None
Json: TypeAlias = Any
# Kind, name, call: the place of a value within a batch.
ProbeKey: TypeAlias = tuple[str, str, int]

# Each description is what docs/ledger-fields.md says of the values.
_text = Meta(max_length=MAX_NAME, description=f"a text of at most {MAX_NAME} characters")
_short = Meta(max_length=MAX_NAME)
_whole = Meta(ge=0, le=MAX_WHOLE, description="a whole number from 0 to 2^63 - 1")
# What `float.hex` gives: equal texts mean equal bits.
_HEX_FLOAT = (
    r"\A(?:nan|-?(?:inf|0x(?:0\.0p\+0|0\.(?!0{13})[0-9a-f]{13}p-1022|1\.[0-9a-f]{13}p"
    r"(?:\+(?:0|[1-9]\d?|[1-9]\d\d|10[01]\d|102[0-3])|-(?:[1-9]\d?|[1-9]\d\d|10[01]\d|102[0-2])))))\Z"
)


def _hex(digits: int) -> Meta:
    return Meta(pattern=rf"\A[0-9a-f]{{{digits}}}\Z", description=f"{digits} lowercase hex digits")


def _describe(description: str) -> Meta:
    return Meta(description=description)


def _bounded(low: int, high: int) -> Meta:
    return Meta(ge=low, le=high, description=f"a whole number from {low} to {high}")


Text: TypeAlias = Annotated[str, _text]
Name: TypeAlias = Annotated[str, _short]
Whole: TypeAlias = Annotated[int, _whole]
WholeOrNone: TypeAlias = Annotated[Whole | None, _describe(f"{_whole.description}, or null")]
Growth: TypeAlias = Annotated[int, _bounded(0, MAX_GROWTH)]
Digest: TypeAlias = Annotated[str, _hex(DIGEST_DIGITS)]
DigestOrNone: TypeAlias = Annotated[
    Digest | None, _describe(f"{DIGEST_DIGITS} lowercase hex digits, or null")
]
HexFloat: TypeAlias = Annotated[str, Meta(pattern=_HEX_FLOAT)]
HexFloats: TypeAlias = Annotated[
    Mapping[Name, HexFloat], _describe("an object of texts that float.hex() gives")
]
Digests32: TypeAlias = Mapping[Name, Digest]
Scalars: TypeAlias = Annotated[
    Mapping[Name, Name | int | float | bool | None],
    _describe("an object of short texts, finite numbers, booleans and nulls"),
]
Place: TypeAlias = Annotated[
    tuple[Name, Name, Whole],
    _describe(f"[kind, name, call], texts of at most {MAX_NAME} characters and a number"),
]


class FieldError(ValueError):
    """A field of a record is missing or has a value that the schema does not allow.

    Attributes:
        field: Its name, dotted where it is nested.
        problem: The rest of a sentence that begins with the field.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"field {quote(field)} {problem}")
        self.field = field
        self.problem = problem


class Entry(Struct, frozen=True, kw_only=True):
    """A record, or a part of one. Fields are written in the order of the class.

    Attributes:
        kind: What the record begins with; empty for a part of a record.
        parts: The class of each field that holds an entry, or a list of entries.
        omitted: Fields that are left out while they are null, 0 or without items.
        cut: Fields whose texts are cut to ``MAX_NAME`` characters.
        uncompared: Fields that are never compared.
        extra: Fields that this version does not know; not a field of the file.
    """

    kind: ClassVar[str] = ""
    parts: ClassVar[Mapping[str, "type[Entry]"]] = {}
    omitted: ClassVar[tuple[str, ...]] = ()
    cut: ClassVar[tuple[str, ...]] = ()
    uncompared: ClassVar[tuple[str, ...]] = ()
    extra: Mapping[str, Json] = {}

    def __post_init__(self) -> None:
        for name in self.cut:
            text = getattr(self, name)
            if text is not None:
                structs.force_setattr(self, name, text[:MAX_NAME])

    def as_record(self) -> dict[str, Json]:
        """Return what is written, JSON values by name."""
        record: dict[str, Json] = {"kind": self.kind} if self.kind else {}
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name != "extra" and (value or value == "" or name not in self.omitted):
                record[name] = _to_plain(value)
        return {**record, **self.extra}


def _to_plain(value: Any) -> Json:
    if isinstance(value, Entry):
        return value.as_record()
    if isinstance(value, Mapping):
        return {name: _to_plain(entry) for name, entry in value.items()}
    return [*map(_to_plain, value)] if isinstance(value, tuple | list) else value


class Header(Entry, frozen=True, kw_only=True):
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
    """

    kind: ClassVar[str] = "header"
    omitted: ClassVar[tuple[str, ...]] = ("program",)
    uncompared: ClassVar[tuple[str, ...]] = ("package", "created", "program")
    schema: Annotated[
        int, Meta(ge=1, le=MAX_WHOLE, description="a whole number from 1 to 2^63 - 1")
    ] = SCHEMA
    package: Text
    rank: Annotated[int, _bounded(0, MAX_RANKS - 1)]
    world_size: Annotated[int, _bounded(1, MAX_RANKS)]
    fit: Whole
    seed: Whole
    created: Text
    program: Scalars = {}
    settings: Scalars
    stack: Scalars

    def __post_init__(self) -> None:
        if self.rank >= self.world_size:
            raise ValueError(f"rank {self.rank} is not below world_size {self.world_size}")


class LoaderFacts(Entry, frozen=True):
    """The size of a training dataloader; None where it is unknown, as of an iterable dataset.

    Attributes:
        samples: Number of samples of the dataset.
        batch_size: Number of samples in a batch.
        batches: Number of batches in an epoch.
    """

    samples: WholeOrNone
    batch_size: WholeOrNone
    batches: WholeOrNone


class RunFacts(Entry, frozen=True, kw_only=True):
    """The model, data and arithmetic: two runs that differ here are not comparable.

    Attributes:
        model: Digest of the model's names, shapes and dtypes.
        parameters: Number of scalars in all parameters.
        train: One entry for each training dataloader.
        trainer: Settings of the Trainer that change the arithmetic (precision, accumulation, ...).
    """

    kind: ClassVar[str] = "run"
    parts: ClassVar[Mapping[str, type[Entry]]] = {"train": LoaderFacts}
    model: Text
    parameters: Whole
    train: Annotated[tuple[LoaderFacts, ...], _describe("a list of LoaderFacts")]
    trainer: Scalars = {}


class Digests(Entry, frozen=True, kw_only=True):
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
    """

    kind: ClassVar[str] = "digests"
    omitted: ClassVar[tuple[str, ...]] = ("sketches",)
    uncompared: ClassVar[tuple[str, ...]] = ("sketches",)
    moment: Text
    epoch: Whole
    step: Whole
    totals: Annotated[Digests32, _describe(f"an object of digests of {DIGEST_DIGITS} hex digits")]
    groups: Annotated[Mapping[Name, Digests32], _describe("an object of objects of digests")]
    loss: Annotated[HexFloat | None, _describe("a text that float.hex() gives, or null")] = None
    scalars: HexFloats = {}
    sketches: Annotated[
        Mapping[Name, Annotated[str, _hex(SKETCH_DIGITS)]],
        _describe(f"an object of sketches of {SKETCH_DIGITS} hex digits"),
    ] = {}


class Evaluation(Entry, frozen=True, kw_only=True):
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

    kind: ClassVar[str] = "evaluation"
    omitted: ClassVar[tuple[str, ...]] = ("undigested", "problem")
    cut: ClassVar[tuple[str, ...]] = ("problem",)
    name: Text
    epoch: Whole
    step: Whole
    batches: Whole
    outputs: Digest
    undigested: Whole = 0
    problem: Annotated[Name | None, _describe(f"{_text.description}, or null")] = None
    scalars: HexFloats = {}


class ReplayDrift(Entry, frozen=True, kw_only=True):
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
    """

    kind: ClassVar[str] = "replay"
    epoch: Whole
    step: Whole
    batch: Whole
    place: Place
    expected: DigestOrNone
    actual: DigestOrNone
    count: Whole
    total: Whole


class RankDrift(Entry, frozen=True, kw_only=True):
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
    rank: Annotated[int, _bounded(0, MAX_RANKS)]
    group: Text
    name: Text


class End(Entry, frozen=True, kw_only=True):
    """The last record of a fit that finished or failed; a killed fit has none.

    Attributes:
        status: The outcome.
        error: The error's message.
        drift: The difference between ranks, if that is the error.
    """

    kind: ClassVar[str] = "end"
    omitted: ClassVar[tuple[str, ...]] = ("error", "drift")
    parts: ClassVar[Mapping[str, type[Entry]]] = {"drift": RankDrift}
    cut: ClassVar[tuple[str, ...]] = ("error",)
    uncompared: ClassVar[tuple[str, ...]] = ("error", "drift")
    status: Annotated[
        str, Meta(pattern=r"\A(?:finished|failed)\Z", description="'finished' or 'failed'")
    ]
    error: Annotated[Name | None, _describe(f"{_text.description}, or null")] = None
    drift: Annotated[RankDrift | None, _describe("an object: RankDrift")] = None

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


class ProbeLayout(Entry, frozen=True, forbid_unknown_fields=True):
    """The places of probes; later records refer to it by number.

    Attributes:
        id: Its number, valid until a later layout has the same one.
        places: ``[kind, name, call]`` in order of execution; call = how often this kind and name
            occurred before within the batch.
    """

    kind: ClassVar[str] = "layout"
    id: Whole
    places: Annotated[
        tuple[Place, ...],
        Meta(
            min_length=1,
            max_length=MAX_LAYOUT_PLACES,
            description=f"a list of 1 to {MAX_LAYOUT_PLACES} places",
        ),
    ]

    def __post_init__(self) -> None:
        if len(set(self.places)) < len(self.places):
            raise ValueError("`places` has a place twice")


class ProbesRecord(Entry, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
    digests: Annotated[
        bytes,
        Meta(
            min_length=DIGEST_BYTES,
            description=f"{DIGEST_DIGITS} lowercase hex digits for each place",
        ),
    ]
    count: Annotated[int, _bounded(1, MAX_GROUP)] = 1
    steps: Growth = 1
    batches: Growth = 1


class FramesEnd(Entry, frozen=True, forbid_unknown_fields=True):
    """The end of the digests of probes that precede the next record, in the file of frames.

    Attributes:
        bytes: The size of the file.
        last: The check of its last block.
    """

    kind: ClassVar[str] = "frames"
    bytes: Whole
    last: Annotated[str, _hex(16)]


class Resume(Entry, frozen=True, kw_only=True):
    """The ledger that a resumed run continues.

    Attributes:
        parent: The continued folder, as it was named.
        parent_check: The chain hash of its last record when the checkpoint was saved.
        epoch: The epoch that was next or under way.
        step: The global step.
        batch: How many batches of the epoch were trained.
        inexact: Why the resumed run cannot end at the bits of an uninterrupted one.
    """

    kind: ClassVar[str] = "resume"
    omitted: ClassVar[tuple[str, ...]] = ("inexact",)
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
    inexact: Annotated[tuple[Name, ...], _describe("a list of short texts")] = ()

    def __post_init__(self) -> None:
        structs.force_setattr(self, "inexact", tuple(text[:MAX_NAME] for text in self.inexact))


class Opaque(Struct, frozen=True):
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

# Made once: `json.dumps` makes one in each call.
_to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


CHAIN_START = b"0" * 16


def chain_record(body: bytes, previous: bytes) -> tuple[bytes, bytes]:
    """Return (line, chain hash) of a record's JSON, given the chain hash before it."""
    head = body[:-1]
    chain_hash = blake2b(previous + head, digest_size=8).hexdigest().encode()
    return b'%b,"check":"%b"}\n' % (head, chain_hash), chain_hash


def kind_prefix(entry: type[Entry]) -> bytes:
    """Return the bytes with which the JSON text of each record of a kind begins."""
    return b'{"kind":"%b"' % entry.kind.encode()


def encode_record(record: Mapping[str, Json]) -> bytes:
    """Return the JSON text of one record: ASCII, compact, fields in the order given.

    Raises:
        FieldError: When the record is not one that ``decode_record`` would accept.
    """
    try:
        body = _to_json(record).encode("ascii")
    except RecursionError as error:
        raise FieldError("record", f"nests deeper than {MAX_DEPTH} levels") from error
    except (TypeError, ValueError) as error:
        raise FieldError("record", f"cannot be written as JSON: {error}") from error
    decode_record(body)
    return body


def decode_record(body: bytes) -> Record:
    """Parse the JSON text of one record, without its chain hash.

    Raises:
        FieldError: When it is not JSON, or not a record of the schema.
    """
    if len(body) > MAX_ITEMS and body.count(b",") + body.count(b"[") + body.count(b"{") > MAX_ITEMS:
        raise FieldError("record", f"holds more than {MAX_ITEMS} values")
    try:
        fields = json.loads(body)
        _check_depth([fields], -1)
        lossless = _to_json(fields).encode("ascii") == body
    except RecursionError as error:
        raise FieldError("record", f"nests deeper than {MAX_DEPTH} levels") from error
    except ValueError as error:
        if isinstance(error, FieldError):
            raise
        raise FieldError("record", f"is not JSON: {error}") from error
    if not lossless:
        raise FieldError("record", "is not compact ASCII JSON, or names a field twice")
    return parse_record(fields)


def _check_depth(value: Json, depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        raise FieldError("record", f"nests deeper than {MAX_DEPTH} levels")
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, dict | list):
            _check_depth(inner, depth + 1)


def parse_record(fields: Json) -> Record:
    """Check a decoded record and return it as its type.

    Raises:
        FieldError: When a field is missing, has another type, or is out of bounds.
    """
    if not isinstance(fields, Mapping) or next(iter(fields), "") != "kind":
        raise FieldError("kind", "must come first")
    kind = fields["kind"]
    if not isinstance(kind, str) or len(kind) > MAX_NAME:
        raise FieldError("kind", f"must be a short text, and is {quote(kind)}")
    if "check" in fields:
        raise FieldError("check", "occurs twice")
    rest = {name: value for name, value in fields.items() if name != "kind"}
    entry = RECORD_TYPES.get(kind)
    if entry is None:
        return Opaque(kind, rest)
    if entry is Header and "schema" not in rest:
        raise FieldError("schema", "is missing")
    if entry is ProbesRecord and isinstance(rest.get("digests"), str):
        rest["digests"] = _unpack_digests(rest["digests"])
    try:
        return cast("Record", convert(_part_unknown(entry, rest), entry))
    except ValidationError as error:
        problem, _, path = str(error).partition(" - at ")
        name = path.replace("`", "").removeprefix("key in ").removeprefix("$").removeprefix(".")
        raise FieldError(name or kind, f"does not fit: {problem}") from error


def _part_unknown(entry: type[Entry], fields: Json) -> Json:
    """Return the fields of an entry, with those that its class does not know as ``extra``."""
    if isinstance(fields, list):
        return [_part_unknown(entry, part) for part in fields]
    if not isinstance(fields, dict) or entry.__struct_config__.forbid_unknown_fields:
        return fields
    known = {name for name in entry.__struct_fields__ if name != "extra"}
    sorted_out = {name: value for name, value in fields.items() if name in known}
    for name in entry.parts.keys() & sorted_out.keys():
        sorted_out[name] = _part_unknown(entry.parts[name], sorted_out[name])
    extra = {name: value for name, value in fields.items() if name not in known}
    return {**sorted_out, "extra": extra}


def _unpack_digests(text: str) -> bytes:
    """Return the digests of a record of schema 1, which are text."""
    try:
        digests = bytes.fromhex(text)
    except ValueError:
        digests = b""
    if digests.hex() != text:
        raise FieldError("digests", f"must be lowercase hex digits, and is {quote(text)}")
    return digests
