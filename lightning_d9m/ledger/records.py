"""The typed records of a ledger; ``schema`` parses them.

Unknown fields are kept in ``extra`` and unknown kinds in ``Opaque``. Both are compared like known
ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from lightning_d9m.errors import DriftError

Scalar: TypeAlias = str | int | float | bool | None
Json: TypeAlias = Any
# Kind, name, call: the place of a value within a batch.
ProbeKey: TypeAlias = tuple[str, str, int]

SCHEMA = 2
MAX_NAME = 4096
# The most places of one layout, so that a frame has at most 256 KiB.
MAX_LAYOUT_PLACES = 16_384
DIGEST_DIGITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The first record of a rank's file: the origin of the digests.

    Attributes:
        rank: The rank that writes the file, below ``world_size``.
        world_size: Number of ranks.
        fit: Ordinal of the fit within its process, from 0.
        seed: The base seed.
        created: Time of writing, ISO 8601 in UTC; never compared.
        settings: Settings of the session, flat.
        stack: Everything that bit-exactness may depend on, flat; see ``ledger.stack``.
        package: Version of lightning_d9m.
        program: Command, git commit, and whether the source differs from it; never compared. See
            ``ledger.program``.
        schema: Version of this format.
        extra: Fields that this version does not know.
    """

    rank: int
    world_size: int
    fit: int
    seed: int
    created: str
    settings: Mapping[str, Scalar]
    stack: Mapping[str, Scalar]
    package: str
    program: Mapping[str, Scalar] = field(default_factory=dict)
    schema: int = SCHEMA
    extra: Mapping[str, Json] = field(default_factory=dict)

    def as_record(self) -> dict[str, Json]:
        """Return the record that is written."""
        return {
            "kind": "header",
            "schema": self.schema,
            "package": self.package,
            "rank": self.rank,
            "world_size": self.world_size,
            "fit": self.fit,
            "seed": self.seed,
            "created": self.created,
            **({"program": dict(self.program)} if self.program else {}),
            "settings": dict(self.settings),
            "stack": dict(self.stack),
            **self.extra,
        }


@dataclass(frozen=True, slots=True)
class LoaderFacts:
    """The size of a training dataloader; None where it is unknown, as of an iterable dataset."""

    samples: int | None
    batch_size: int | None
    batches: int | None
    extra: Mapping[str, Json] = field(default_factory=dict)

    def as_record(self) -> dict[str, Json]:
        """Return the entry that is written."""
        return {
            "samples": self.samples,
            "batch_size": self.batch_size,
            "batches": self.batches,
            **self.extra,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The model, data and arithmetic: two runs that differ here are not comparable.

    Attributes:
        model: Digest of the model's names, shapes and dtypes.
        parameters: Number of scalars in all parameters.
        train: One entry for each training dataloader.
        trainer: Settings of the Trainer that change the arithmetic (precision, accumulation, ...).
        extra: Fields that this version does not know.
    """

    model: str
    parameters: int
    train: Sequence[LoaderFacts]
    trainer: Mapping[str, Scalar] = field(default_factory=dict)
    extra: Mapping[str, Json] = field(default_factory=dict)

    def as_record(self) -> dict[str, Json]:
        """Return the record that is written."""
        return {
            "kind": "run",
            "model": self.model,
            "parameters": self.parameters,
            "train": [loader.as_record() for loader in self.train],
            "trainer": dict(self.trainer),
            **self.extra,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Digests:
    """Digests of one moment of the training.

    Attributes:
        moment: ``"initial"``, ``"epoch"``, ``"final"``, or one that a later version adds.
        epoch: Counted from 0; of ``"final"``, the last epoch that was trained.
        step: The global step.
        totals: One digest (32 hex digits) for each group.
        groups: Digest by name, by group; a group may be left out and have only its total.
        loss: ``float.hex()`` of the last training loss, if there was one.
        scalars: ``float.hex()`` of each logged scalar.
        extra: Fields that this version does not know.
    """

    moment: str
    epoch: int
    step: int
    totals: Mapping[str, str]
    groups: Mapping[str, Mapping[str, str]]
    loss: str | None = None
    scalars: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Json] = field(default_factory=dict)

    def as_record(self) -> dict[str, Json]:
        """Return the record that is written."""
        return {
            "kind": "digests",
            "moment": self.moment,
            "epoch": self.epoch,
            "step": self.step,
            "totals": dict(self.totals),
            "groups": {group: dict(entries) for group, entries in self.groups.items()},
            "loss": self.loss,
            "scalars": dict(self.scalars),
            **self.extra,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDrift:
    """The difference between ranks that ended a fit.

    Attributes:
        moment: The moment of the digests that differ.
        epoch: Counted from 0.
        step: The global step.
        rank: The first rank that differs.
        group: The group of its entries that differ, such as ``"weights"``.
        name: The first of these entries.
    """

    moment: str
    epoch: int
    step: int
    rank: int
    group: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The last record of a fit that finished or failed; a killed fit has none.

    Attributes:
        status: ``"finished"`` or ``"failed"``.
        error: The error's message; never compared.
        drift: The difference between ranks, if that is the error; never compared.
        extra: Fields that this version does not know.
    """

    status: str
    error: str | None = None
    drift: RankDrift | None = None
    extra: Mapping[str, Json] = field(default_factory=dict)

    def as_record(self) -> dict[str, Json]:
        """Return the record that is written."""
        error = {} if self.error is None else {"error": self.error[:MAX_NAME]}
        drift = {} if self.drift is None else {"drift": asdict(self.drift)}
        return {"kind": "end", "status": self.status, **error, **drift, **self.extra}

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
                name=error.names[0][:MAX_NAME],
            )
        return cls(status="failed", error=f"{type(error).__name__}: {error}", drift=drift)


@dataclass(frozen=True, slots=True)
class ProbeLayout:
    """The places of probes; later records refer to it by number.

    Attributes:
        id: Its number, valid until a later layout has the same one.
        places: (kind, name, call) in order of execution; call = how often this kind and name
            occurred before within the batch.
    """

    id: int
    places: tuple[ProbeKey, ...]

    def as_record(self) -> dict[str, Json]:
        """Return the record that is written."""
        places = [list(place) for place in self.places]
        return {"kind": "layout", "id": self.id, "places": places}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbesRecord:
    """Digests at the places of consecutive batches, or of a part of one batch.

    Attributes:
        epoch: Counted from 0.
        step: The global step when the first batch began.
        batch: Index of the first batch within the epoch.
        layout: Number of the ``ProbeLayout`` that names the places.
        digests: 16 bytes for each place, batch after batch.
        count: Number of batches.
        steps: Growth of the step from batch to batch.
        batches: Growth of the index.
    """

    epoch: int
    step: int
    batch: int
    layout: int
    digests: bytes
    count: int = 1
    steps: int = 1
    batches: int = 1

    def as_record(self) -> dict[str, Json]:
        """Return the record that is given to the writer."""
        return {
            "kind": "probes",
            "epoch": self.epoch,
            "step": self.step,
            "batch": self.batch,
            "layout": self.layout,
            "digests": self.digests,
            "count": self.count,
            "steps": self.steps,
            "batches": self.batches,
        }


@dataclass(frozen=True, slots=True)
class FramesEnd:
    """The end of the digests of probes that precede the next record, in the file of frames.

    Attributes:
        bytes: The size of the file.
        last: The check of its last block.
    """

    bytes: int
    last: str

    def as_record(self) -> dict[str, Json]:
        """Return the record that is written."""
        return {"kind": "frames", "bytes": self.bytes, "last": self.last}


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """The ledger that a resumed run continues.

    Attributes:
        parent: The continued folder, as it was named.
        parent_check: The chain hash of its last record when the checkpoint was saved.
        epoch: The epoch that was next or under way.
        step: The global step.
        batch: How many batches of the epoch were trained.
        extra: Fields that this version does not know.
    """

    parent: str
    parent_check: str
    epoch: int
    step: int
    batch: int
    extra: Mapping[str, Json] = field(default_factory=dict)

    def as_record(self) -> dict[str, Json]:
        """Return the record that is written."""
        return {
            "kind": "resume",
            "parent": self.parent,
            "parent_check": self.parent_check,
            "epoch": self.epoch,
            "step": self.step,
            "batch": self.batch,
            **self.extra,
        }


@dataclass(frozen=True, slots=True)
class Opaque:
    """A record of an unknown kind, compared field by field."""

    kind: str
    fields: Mapping[str, Json]

    def as_record(self) -> dict[str, Json]:
        """Return the record that is written."""
        return {"kind": self.kind, **self.fields}


Record: TypeAlias = (
    Header | RunFacts | Digests | ProbeLayout | ProbesRecord | FramesEnd | Resume | End | Opaque
)
