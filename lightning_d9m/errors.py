"""The exceptions of the package, and what to do about files. It imports nothing of the package.

Each message names the problem, the value, the allowed values and the remedy. The facts are also
attributes, so that programs need not parse the text.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_type_hints

_ADVICE = {
    errno.ENOENT: "Check the path.",
    errno.ENOTDIR: "A part of the path is a file, not a folder; choose another path.",
    errno.ELOOP: "Its symbolic links lead in a circle; remove them or name the real folder.",
    errno.EACCES: "Give this user the permission, or choose another folder.",
    errno.EPERM: "Give this user the permission, or choose another folder.",
    errno.EROFS: "Choose a folder on a file system that can be written.",
    errno.ENOSPC: "Free some space, or put the ledger on another disk.",
    errno.EDQUOT: "Free some space, or put the ledger on another disk.",
    errno.EFBIG: "Raise the limit on the size of a file (ulimit -f), or record fewer moments.",
    errno.EEXIST: "Nothing was overwritten; choose a new folder.",
    errno.ENAMETOOLONG: "Choose a shorter path.",
}


class D9mError(Exception):
    """The base of every error that lightning_d9m raises."""

    # The annotations of a class are its facts, so that a misspelled one is an error where it is
    # raised, and not where a program reads it.
    def __init__(self, *words: object, **facts: object) -> None:
        super().__init__(*words)
        if unknown := facts.keys() - get_type_hints(type(self)).keys():
            raise TypeError(f"{type(self).__name__} has no {sorted(unknown)}")
        for name, fact in facts.items():
            setattr(self, name, tuple(fact) if isinstance(fact, list) else fact)


class SettingError(D9mError, ValueError):
    """A setting has a value that is not allowed, or two settings contradict each other."""


class TooLateError(D9mError, RuntimeError):
    """A switch was set too late to take effect."""


class HookMissingError(D9mError, RuntimeError):
    """A library lacks a private name that this package replaces or reads.

    Attributes:
        library: The package: ``"torch"``, ``"lightning"``, ...
        version: Its version.
        name: The name, with its module and class.
    """

    library: str
    version: str
    name: str


class DigestError(D9mError, TypeError):
    """A value has no digest: its bytes are not defined or not reachable."""


class LedgerError(D9mError, OSError):
    """A ledger cannot be written or read, or a file is not a ledger."""


class CommandError(D9mError, RuntimeError):
    """A command that `d9m` ran failed, such as the training; `d9m` ends with exit status 3."""


class ReferenceRefusedError(D9mError, ValueError):
    """A reference comes from another experiment and cannot be compared with this run.

    Attributes:
        field: What differs: ``"seed"``, ``"model"``, ``"dataset"``, ``"world_size"``, ...
        expected: The reference's value.
        actual: This run's value.
    """

    field: str
    expected: object
    actual: object


class StackDifferenceError(D9mError, RuntimeError):
    """The stack differs from that of the reference, so equal bits cannot be promised.

    Attributes:
        differences: One ``(field, expected, actual)`` for each field that differs.
    """

    differences: tuple[tuple[str, object, object], ...]


class NotPortableError(D9mError, NotImplementedError):
    """An operation cannot be computed with the same bits on every machine.

    Attributes:
        op: The operation of torch, such as ``"aten.linalg_qr.default"``.
        source: The line of the program that called it, as ``"file:line"``; None if unknown.
    """

    op: str
    source: str | None


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

    moment: str
    epoch: int
    step: int
    rank: int
    group: str = ""
    names: tuple[str, ...] = ()
    count: int
    total: int = 0
    expected: str = ""
    actual: str = ""
    expected_rank: int | None = None


class RanksDisagreeError(D9mError, RuntimeError):
    """The ranks of a run are about to do different things and cannot continue.

    Attributes:
        intents: The next collective of each rank, in rank order.
    """

    intents: tuple[str, ...]


class RankLostError(D9mError, RuntimeError):
    """Another rank ended, or Horovod was shut down, while this rank waited for the others.

    Attributes:
        rank: The rank that reports the loss, not the one that is lost.
        activity: The collective that it waited for.
        lost: The lost ranks, as far as they are known.
    """

    rank: int
    activity: str
    lost: tuple[int, ...] = ()


class InexactResumeError(D9mError, RuntimeError):
    """A resumed run cannot end at the bits of the uninterrupted one.

    Attributes:
        reasons: The reasons, one sentence each.
    """

    reasons: tuple[str, ...]


class CheckpointError(D9mError, RuntimeError):
    """A checkpoint is damaged, or is not the checkpoint of the ledger that it names.

    Attributes:
        names: The tensors whose bytes differ from the saved ones; empty if unknown.
    """

    names: tuple[str, ...] = ()


def explain_file_error(error: OSError | ValueError | RecursionError) -> str:
    """Return the cause of a failed file operation and what to do about it."""
    number = getattr(error, "errno", None)
    if number is None:
        return f"{error}."
    return f"{os.strerror(number)}. {_ADVICE.get(number, 'Check the path and the disk.')}"


@contextmanager
def file_errors(kind: type[D9mError], what: str, advice: str = "") -> Iterator[None]:
    """Explain a file operation of the body that fails; ours come through.

    Args:
        kind: The class of the error.
        what: What cannot be done, with the path.
        advice: Further advice.

    Raises:
        D9mError: If the body raises an ``OSError`` or a ``ValueError``, or a ``RecursionError``, as
            decoders do for values that are nested too deeply.
    """
    # `LedgerError` is an `OSError`, too, and has said already what is wrong.
    try:
        yield
    except D9mError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise kind(
            " ".join(filter(None, [f"{what}: {explain_file_error(error)}", advice]))
        ) from error


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield the path of a new file beside ``path``, which takes its place at the end.

    If the body raises, as on a full disk, ``path`` is as it was, and no part of a file is left.
    """
    # Beside it, because a file is replaced atomically only within one file system. With the number
    # of the process, because two may write the same file.
    target = path.resolve()  # a link stays a link
    part = target.with_name(f".{target.name}.{os.getpid()}")
    if target.exists() and not target.is_file():  # a device or a pipe
        part = target
    try:
        yield part
        part.replace(target)
    finally:
        if part != target:
            part.unlink(missing_ok=True)
