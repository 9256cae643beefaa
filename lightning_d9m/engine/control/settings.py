"""Settings of a deterministic session, and from environment variables.

``LIGHTNING_D9M_SEED=42`` is ``seed=42``. This is the only parser of the variables. Names and types
come from the signature of the class or function that takes the settings. This module does not
import torch.
"""

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from lightning_d9m.errors import SettingError
from lightning_d9m.ops.portability import is_portable

# The range of Lightning's `seed_everything`, so that one number serves both.
HIGHEST_SEED = 2**32 - 1
# More is a slip of the keyboard, and OpenMP would try to start them.
HIGHEST_THREADS = 4096


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a deterministic session.

    Attributes:
        seed: Base of every seed, from 0 to 4294967295.
        per_sample_rng: Seed the random generators for every sample by (seed, epoch, index), so
            that its draws do not depend on its batch; otherwise seed them for every batch.
        threads: Number of intra-op CPU threads to pin, from 1; None keeps the current number.
        fill_uninitialized_memory: Fill new tensors, so that a program that reads uninitialized
            memory is exact too. It does not change the results of a correct program.
        patch_ops: On a CUDA machine, replace the operations that torch leaves nondeterministic;
            see ``d9m ops``. Without it, torch raises where it has no deterministic kernel.
        unpatched_ops: Names of operations that torch computes anyway.
        varying_ops: Operations that run although they may vary: names of ``d9m ops``, or of
            torch's dispatcher such as ``"torchvision::_roi_pool_backward"``. Without it, torch
            raises. The ledger and each verdict name them.
        repeat_fits: A fit after a call of ``torch.manual_seed`` or ``seed_everything`` draws the
            numbers that the fit after an earlier call with the same seed drew, as without this
            package; otherwise each fit of a process draws its own. Calls are seen while a session
            is open, and after the first ``DeterminismCallback`` was made.
        portable: Compute every operation so that the bits are the same on every machine, up to
            twice as slow; see ``docs/portable.md``. The default is True if the variables
            ``LIGHTNING_D9M`` and ``LIGHTNING_D9M_PORTABLE`` are 1.

    Raises:
        SettingError: If a value is not allowed.
    """

    seed: int = 0
    per_sample_rng: bool = False
    threads: int | None = None
    fill_uninitialized_memory: bool = True
    patch_ops: bool = True
    unpatched_ops: tuple[str, ...] = ()
    varying_ops: tuple[str, ...] = ()
    repeat_fits: bool = True
    portable: bool = field(
        default_factory=lambda: (
            read_switch(os.environ)
            and bool(read_variable("LIGHTNING_D9M_PORTABLE", os.environ, bool))
        )
    )

    def __post_init__(self) -> None:
        _validate_integer("seed", self.seed, 0, HIGHEST_SEED)
        if self.threads is not None:
            _validate_integer("threads", self.threads, 1, HIGHEST_THREADS)
        validate_choices(self)
        for name in ("unpatched_ops", "varying_ops"):
            object.__setattr__(self, name, read_names(name, getattr(self, name)))
        if self.unpatched_ops and not self.patch_ops:
            raise SettingError(
                f"unpatched_ops is {list(self.unpatched_ops)} and patch_ops is off, so nothing is "
                "patched. Switch patch_ops on, or leave unpatched_ops out."
            )
        named = [name for name in self.varying_ops if "::" not in name]
        if named := [*self.unpatched_ops, *named]:
            from lightning_d9m.ops.patches.catalog.catalog import find_op

            for name in named:
                find_op(name)  # raises for a misspelled name

    def as_record(self) -> dict[str, int | bool | str | None]:
        """Return the settings as the ledger stores them; one that is off by default only if on."""
        names = ("unpatched_ops", "varying_ops")
        record = asdict(self) | {name: " ".join(sorted(getattr(self, name))) for name in names}
        del record["repeat_fits"]  # the header has the number of the fit
        record["portable"] = self.portable or is_portable()  # which may have been entered before
        if record["portable"]:  # which patches nothing
            record |= {"patch_ops": False, "unpatched_ops": ""}
        rare = ("portable", "varying_ops")
        return {name: value for name, value in record.items() if value or name not in rare}


def validate_choices(owner: object) -> None:
    """Check the fields of a dataclass that allow some words, or True and False.

    Raises:
        SettingError: If one has another value.
    """
    for name, kind in get_type_hints(type(owner)).items():
        allowed = get_args(kind) if get_origin(kind) is Literal else (True, False)
        if kind is bool or get_origin(kind) is Literal:
            validate_choice(name, getattr(owner, name), allowed)


def validate_choice(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raise a ``SettingError`` if a setting is not one of the allowed values."""
    # 1 is equal to True.
    if not any(isinstance(value, type(choice)) and value == choice for choice in allowed):
        raise SettingError(f"{name} is {value!r}; allowed: {' or '.join(map(repr, allowed))}.")


def read_path(name: str, value: object) -> Path | None:
    """Return a setting as a path; None for None. Anything else is a ``SettingError``."""
    if value is None:
        return None
    if not isinstance(value, str | PathLike):
        raise SettingError(f"{name} is {value!r}; allowed: a path, or None for none.")
    return Path(value)


def read_names(name: str, value: object) -> tuple[str, ...]:
    """Return a setting that is one name or several as a tuple; anything else is a SettingError."""
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, Iterable) or not all(isinstance(each, str) for each in names):
        raise SettingError(f"{name} is {value!r}; allowed: a name, or a list of names.")
    return tuple(names)


def _validate_integer(name: str, value: object, low: int, high: int) -> None:
    # True is an int in Python, and surely a mistake as a seed.
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise SettingError(f"{name} is {value!r}; allowed: a whole number from {low} to {high}.")


SWITCH = "LIGHTNING_D9M"
_PREFIX = f"{SWITCH}_"
RECORD_SAVES = f"{_PREFIX}RECORD_SAVES"
_YES = ("1", "true", "yes", "on")
_NO = ("0", "false", "no", "off")
_NAMES = {int: "a whole number", float: "a number", NoneType: "none", str: "a text", Path: "a path"}
_T = TypeVar("_T")
_NOT_BY_VARIABLE = "nothing; it is set in the program"
# Each is read where it is used and takes precedence over the arguments of every callback.
CONTROL_VARIABLES = (
    "LIGHTNING_D9M_CHECKPOINT_DIR",
    "LIGHTNING_D9M_CONTROL",
    "LIGHTNING_D9M_EVERY_N_STEPS",
    "LIGHTNING_D9M_EVIDENCE",
    "LIGHTNING_D9M_EVIDENCE_OF",
    "LIGHTNING_D9M_EVIDENCE_OPS",
    "LIGHTNING_D9M_INTERRUPT",
    "LIGHTNING_D9M_LEDGER_DIR",
    "LIGHTNING_D9M_LOGICAL_RANKS",
    "LIGHTNING_D9M_ON_INEXACT_RESUME",
    "LIGHTNING_D9M_PROBES",
    "LIGHTNING_D9M_PROBE_MODULES",
    "LIGHTNING_D9M_PROBE_STEPS",
    "LIGHTNING_D9M_PROVABLE",
    RECORD_SAVES,
    "LIGHTNING_D9M_RESUME",
    "LIGHTNING_D9M_WATCH",
)

# Those that interrupt a fit; see ``recording/interruption.py``.
INTERRUPTING = ("LIGHTNING_D9M_INTERRUPT", "LIGHTNING_D9M_RESUME")


def variable_of(setting: str) -> str:
    """Return the name of the variable for a setting.

    >>> variable_of("on_drift")
    'LIGHTNING_D9M_ON_DRIFT'
    """
    return _PREFIX + setting.upper()


# Those of Settings, and of options that only a recorder takes.
_KNOWN = {
    *CONTROL_VARIABLES,
    *map(variable_of, Settings.__dataclass_fields__),
    *map(variable_of, ("reference", "on_drift", "on_stack_difference")),
    *map(variable_of, ("ignored_metrics", "accepted_unknown", "summary")),
}


def read_switch(environment: Mapping[str, str]) -> bool:
    """Return whether ``LIGHTNING_D9M`` is on.

    Raises:
        SettingError: If its value is neither 1 nor 0 nor a synonym.
    """
    return bool(read_variable(SWITCH, environment, bool))


def read_variable(variable: str, environment: Mapping[str, str], annotation: Any) -> Any:
    """Return the value of a variable, or None if it is not set or empty.

    Raises:
        SettingError: If the value is not allowed.
    """
    text = environment.get(variable, "").strip()
    return read_value(variable, text, annotation) if text else None


def read_settings(owner: Callable[..., Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings that variables give; an empty variable counts as not set.

    The signature of ``owner``, a class or function, has their names and types.

    Raises:
        SettingError: If a value is not allowed, or a variable ``LIGHTNING_D9M_*`` does not exist.
    """
    _reject_unknown_variables(environment)
    # From the signature, so that a new setting has its variable, its type and its errors at once.
    settings = {}
    for name, parameter in inspect.signature(owner, eval_str=True).parameters.items():
        text = environment.get(variable_of(name), "").strip()
        if text:
            settings[name] = read_value(variable_of(name), text, parameter.annotation)
    return settings


def build_from_variables(build: Callable[..., _T], settings: Mapping[str, Any]) -> _T:
    """Return ``build(**settings)``; its errors name the variables that give the settings.

    Raises:
        SettingError: If ``build`` rejects a setting.
    """
    try:
        return build(**settings)
    except SettingError as error:
        if not settings:
            raise
        names = ", ".join(variable_of(name) for name in settings)
        raise SettingError(f"{error} (The settings come from {names}.)") from error


def _reject_unknown_variables(environment: Mapping[str, str]) -> None:
    # A misspelled variable would be ignored, and the run would not be what the user has asked for.
    for name in sorted(environment):
        if not name.startswith(_PREFIX) or name in _KNOWN:
            continue
        near = get_close_matches(name, _KNOWN, n=1)
        known = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(sorted(_KNOWN))}."
        raise SettingError(f"The variable {name} does not exist. {known} Correct or unset it.")


def read_value(variable: str, text: str, annotation: Any) -> Any:
    """Parse a variable's text as a type that an annotation allows; commas separate a list.

    Raises:
        SettingError: If the text is none of them.

    >>> read_value("LIGHTNING_D9M_THREADS", "2", int | None)
    2
    >>> read_value("LIGHTNING_D9M_UNPATCHED_OPS", "put_, cumsum", Sequence[str])
    ('put_', 'cumsum')
    """
    is_union = get_origin(annotation) in (Union, UnionType)
    kinds = get_args(annotation) if is_union else (annotation,)
    # Last of all the text itself: every text is a valid str or Path.
    for kind in sorted(kinds, key=lambda kind: kind in (str, Path)):
        try:
            return _parse(text, kind)
        except ValueError:
            continue
    described = [_describe_type(kind) for kind in kinds]
    allowed = " or ".join(text for text in described if text) or _NOT_BY_VARIABLE
    raise SettingError(f"The variable {variable} is {text!r}; allowed: {allowed}.")


def _parse(text: str, kind: Any) -> Any:
    """Parse a text as one type, or raise a ``ValueError``."""
    if kind is bool and text.lower() in _YES + _NO:
        return text.lower() in _YES
    if kind is NoneType and text.lower() == "none":
        return None
    if kind in (int, float, str, Path):
        return kind(text)
    if get_origin(kind) is Literal:
        choices = {str(choice): choice for choice in get_args(kind)}
        if text in choices:
            return choices[text]
    if _is_list(kind):
        parts = [part.strip() for part in text.split(",")]
        if any(parts):
            return tuple(_parse(part, get_args(kind)[0]) for part in parts if part)
    raise ValueError(text)


def _is_list(kind: Any) -> bool:
    origin = get_origin(kind)
    return isinstance(origin, type) and issubclass(origin, Sequence)


def _describe_type(kind: Any) -> str:
    if kind is bool:
        return "1 or 0"
    if get_origin(kind) is Literal:
        return " or ".join(str(choice) for choice in get_args(kind))
    if _is_list(kind):
        return f"{_describe_type(get_args(kind)[0])}, several separated by commas"
    return _NAMES.get(kind, "")


def describe_hash_seed_problem() -> str | None:
    """Return a sentence if the order of sets of strings changes from run to run, else None.

    Python reads ``PYTHONHASHSEED`` only when it starts, so the value at the start counts.
    """
    if not sys.flags.hash_randomization:
        return None  # PYTHONHASHSEED=0
    import psutil  # only here, where it is worth the time

    try:  # as Python was started
        environment: Mapping[str, str] = psutil.Process().environ()
    except psutil.Error:
        environment = os.environ
    # Python accepts a number, "random" or nothing. `sys.flags` reports randomization even with a
    # number. With -E or -I Python does not read the variable.
    if environment.get("PYTHONHASHSEED", "").isdigit() and not sys.flags.ignore_environment:
        return None
    return (
        "PYTHONHASHSEED was not fixed when Python started, so sets of strings may be iterated in "
        "a different order in each run. Start the program with PYTHONHASHSEED=0 (and without "
        "Python's -E and -I, which ignore it); `d9m repeat` does."
    )
