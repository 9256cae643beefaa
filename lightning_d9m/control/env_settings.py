"""Settings from environment variables: ``LIGHTNING_D9M_SEED=42`` is ``seed=42``.

This is the only parser of the variables. Names and types come from the signature of the class or
function that takes the settings. This module does not import torch.
"""

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from lightning_d9m.errors import SettingError

SWITCH = "LIGHTNING_D9M"
_PREFIX = f"{SWITCH}_"
_YES = ("1", "true", "yes", "on")
_NO = ("0", "false", "no", "off")
_NAMES = {int: "a whole number", float: "a number", NoneType: "none", str: "a text", Path: "a path"}
_T = TypeVar("_T")
_NOT_BY_VARIABLE = "nothing; it is set in the program"
# Each is read where it is used and takes precedence over the arguments of every callback.
CONTROL_VARIABLES = (
    "LIGHTNING_D9M_CHECKPOINT_DIR",
    "LIGHTNING_D9M_CONTROL",
    "LIGHTNING_D9M_DUMP",
    "LIGHTNING_D9M_DUMP_NAMES",
    "LIGHTNING_D9M_EVERY_N_STEPS",
    "LIGHTNING_D9M_INTERRUPT",
    "LIGHTNING_D9M_LAST_BITS",
    "LIGHTNING_D9M_LEDGER_DIR",
    "LIGHTNING_D9M_LOGICAL_RANKS",
    "LIGHTNING_D9M_PROBES",
    "LIGHTNING_D9M_PROBE_MODULES",
    "LIGHTNING_D9M_PROBE_RANKS",
    "LIGHTNING_D9M_PROBE_STEPS",
    "LIGHTNING_D9M_REPLAY_EVERY",
    "LIGHTNING_D9M_RESUME",
)


def variable_of(setting: str) -> str:
    """Return the name of the variable for a setting.

    >>> variable_of("on_drift")
    'LIGHTNING_D9M_ON_DRIFT'
    """
    return _PREFIX + setting.upper()


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
        SettingError: If a value is not allowed.
    """
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


def reject_unknown_variables(owner: Callable[..., Any], environment: Mapping[str, str]) -> None:
    """Reject a variable ``LIGHTNING_D9M_*`` that does not exist, such as a misspelled one.

    Raises:
        SettingError: If there is one.
    """
    known = {
        *CONTROL_VARIABLES,
        *(variable_of(name) for name in inspect.signature(owner).parameters),
    }
    for name in sorted(environment):
        if not name.startswith(_PREFIX) or name in known:
            continue
        near = get_close_matches(name, known, n=1)
        raise SettingError(
            f"There is no variable {name}. "
            + (f"Did you mean {near[0]}? " if near else "")
            + f"The variables are {', '.join(sorted(known))}."
        )


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
