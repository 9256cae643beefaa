"""The exceptions of the package. This module imports nothing of the package.

Each message names the problem, the value, the allowed values and the remedy. The facts are also
attributes, so that programs need not parse the text.
"""

from collections.abc import Sequence


class D9mError(Exception):
    """The base of every error that lightning_d9m raises."""


class SettingError(D9mError, ValueError):
    """A setting has a value that is not allowed, or two settings contradict each other."""


class TooLateError(D9mError, RuntimeError):
    """A switch was set too late to take effect."""


class DigestError(D9mError, TypeError):
    """A value has no digest: its bytes are not defined or not reachable."""


class LedgerError(D9mError, OSError):
    """A ledger cannot be written or read, or a file is not a ledger."""


class CommandError(D9mError, RuntimeError):
    """A command that `d9m` ran failed."""


class ReferenceRefusedError(D9mError, ValueError):
    """A reference comes from another experiment and cannot be compared with this run.

    Attributes:
        field: What differs: ``"seed"``, ``"model"``, ``"dataset"``, ``"world_size"``, ...
        expected: The reference's value.
        actual: This run's value.
    """

    def __init__(self, message: str, *, field: str, expected: object, actual: object) -> None:
        super().__init__(message)
        self.field = field
        self.expected = expected
        self.actual = actual


class StackDifferenceError(D9mError, RuntimeError):
    """The stack differs from that of the reference, so equal bits cannot be promised.

    Attributes:
        differences: One ``(field, expected, actual)`` for each field that differs.
    """

    def __init__(self, message: str, *, differences: Sequence[tuple[str, object, object]]) -> None:
        super().__init__(message)
        self.differences = tuple(differences)


class NotPortableError(D9mError, NotImplementedError):
    """An operation cannot be computed with the same bits on every machine.

    Attributes:
        op: The operation of torch, such as ``"aten.linalg_qr.default"``.
        source: The line of the program that called it, as ``"file:line"``; None if unknown.
    """

    def __init__(self, message: str, *, op: str, source: str | None) -> None:
        super().__init__(message)
        self.op = op
        self.source = source


class NotBitExactError(D9mError, AssertionError):
    """Several runs of a function returned different bits."""


class DriftError(D9mError, RuntimeError):
    """A run differs from its reference, or a rank from the other ranks.

    Attributes:
        moment: When the digests were taken: ``"initial"``, ``"epoch"`` or ``"final"``.
        epoch: The epoch, counted from 0.
        step: The global step.
        rank: The first rank that differs.
        group: What differs first: ``"weights"``, ``"buffers"``, ``"optimizers"``, ...
        names: The first names in that group that differ.
        count: How many entries differ in all groups.
        total: How many entries were compared.
        expected: The digest of the first of ``names`` in the reference (or on rank 0).
        actual: The digest of the first of ``names`` in this run (or on ``rank``).
        expected_rank: The rank that ``rank`` differs from; None if the run differs from its
            reference.
    """

    def __init__(  # noqa: PLR0913 - the facts of one drift, each named
        self,
        message: str,
        *,
        moment: str,
        epoch: int,
        step: int,
        rank: int,
        group: str = "",
        names: Sequence[str] = (),
        count: int,
        total: int = 0,
        expected: str = "",
        actual: str = "",
        expected_rank: int | None = None,
    ) -> None:
        super().__init__(message)
        self.moment = moment
        self.epoch = epoch
        self.step = step
        self.rank = rank
        self.group = group
        self.names = tuple(names)
        self.count = count
        self.total = total
        self.expected = expected
        self.actual = actual
        self.expected_rank = expected_rank


class RanksDisagreeError(D9mError, RuntimeError):
    """The ranks of a run are about to do different things and cannot continue.

    Attributes:
        intents: The next collective of each rank, in rank order.
    """

    def __init__(self, message: str, *, intents: Sequence[str]) -> None:
        super().__init__(message)
        self.intents = tuple(intents)


class RankLostError(D9mError, RuntimeError):
    """Another rank ended, or Horovod was shut down, while this rank waited for the others.

    Attributes:
        rank: The rank that reports the loss, not the one that is lost.
        activity: The collective that it waited for.
        lost: The lost ranks, as far as they are known.
    """

    def __init__(self, message: str, *, rank: int, activity: str, lost: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.rank = rank
        self.activity = activity
        self.lost = tuple(lost)


class InexactResumeError(D9mError, RuntimeError):
    """A resumed run cannot end at the bits of the uninterrupted one.

    Attributes:
        reasons: The reasons, one sentence each.
    """

    def __init__(self, message: str, *, reasons: Sequence[str]) -> None:
        super().__init__(message)
        self.reasons = tuple(reasons)


class CheckpointError(D9mError, RuntimeError):
    """A checkpoint is damaged, or is not the checkpoint of the ledger that it names.

    Attributes:
        names: The tensors whose bytes differ from the saved ones; empty if unknown.
    """

    def __init__(self, message: str, *, names: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)
