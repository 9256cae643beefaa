"""The settings of probes, validated. Nothing here imports torch."""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_d9m.engine.control.settings import (
    build_from_variables,
    read_names,
    read_settings,
    variable_of,
)
from lightning_d9m.engine.ledger.kinds import ALL, PROBE_KINDS, ROOT
from lightning_d9m.errors import SettingError

if TYPE_CHECKING:
    from typing_extensions import Self

# Not `\d`, which also matches the digits of other scripts.
_STEPS = re.compile(r"([0-9]*):([0-9]*)")


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """The settings of probes; one name need not be in a list.

    Attributes:
        probes: Kinds to record; ``("all",)`` for all of them, empty for none.
        probe_modules: Patterns such as ``"encoder.*"``; a place belongs to the module that makes
            the value or holds the parameter. The whole model is called ``(model)``.
        probe_steps: Global steps, ``"a:b"`` from a up to but without b; either may be left out.
            Empty means all.
        evidence: The name of a place, whose values are kept beside the ledger, with evidence on
            operations; empty for none. See ``Evidence``.
        evidence_ops: Whether that has operations without probes of the kind ``"op"``, too.
        evidence_of: The folder of the run with which operations are compared; None for none.

    Raises:
        SettingError: When a value is not allowed.
    """

    probes: tuple[str, ...] = ()
    probe_modules: tuple[str, ...] = ("*",)
    probe_steps: str = ""
    evidence: str = ""
    evidence_ops: bool = False
    evidence_of: Path | None = None

    def __post_init__(self) -> None:
        plain = {
            "probes": _split("probes", self.probes),
            "probe_modules": _split("probe_modules", self.probe_modules),
            "probe_steps": self.probe_steps or "",
        }
        for name, value in plain.items():
            object.__setattr__(self, name, value)  # it is frozen, and callers give either form
        for kind in self.probes:
            if kind != ALL and kind not in PROBE_KINDS:
                near = get_close_matches(str(kind), PROBE_KINDS, n=1)
                raise SettingError(
                    f"probes has {kind!r}, which is not a kind of probe. "
                    + (f"Did you mean {near[0]!r}? " if near else "")
                    + f"The kinds are {', '.join(PROBE_KINDS)}, or {ALL!r}."
                )
        if not self.probe_modules or "" in self.probe_modules:
            raise SettingError(
                f"probe_modules is {list(self.probe_modules)}; allowed: one or more patterns of "
                'module names, such as "encoder.layers.0" or "encoder.*".'
            )
        _parse_steps(self.probe_steps)

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The kinds that are recorded."""
        return frozenset(PROBE_KINDS if ALL in self.probes else self.probes)

    @cached_property
    def steps(self) -> range:
        """The global steps that are probed."""
        return _parse_steps(self.probe_steps)

    def takes_module(self, name: str) -> bool:
        """Return whether a module's places are recorded; the whole model's name is empty."""
        # Not `fnmatch`, which ignores case on Windows: two modules may differ in case alone.
        return any(fnmatchcase(name or ROOT, pattern) for pattern in self.probe_modules)

    def takes_parameter(self, name: str) -> bool:
        """Return whether a parameter or buffer is recorded: by its module's name or its own."""
        return self.takes_module(name.rpartition(".")[0]) or self.takes_module(name)

    def overridden(self, environment: Mapping[str, str]) -> "Self":
        """Return the settings with the values of variables, which take precedence.

        Raises:
            SettingError: When a variable's value is not allowed, or it selects among probes and
                none are on.
        """
        given = read_settings(ProbeSettings, environment)
        settings = build_from_variables(partial(replace, self), given)
        # The user would wait for records that never come.
        idle = [variable_of(name) for name in given if name != "probes"]
        if idle and not settings.kinds:
            raise SettingError(
                f"No probes are on, so these variables have no effect: {', '.join(idle)}. Unset "
                f"them, or set {variable_of('probes')} too, to {ALL!r} or to kinds separated by "
                f"commas ({', '.join(PROBE_KINDS)})."
            )
        return settings

    def as_record(self) -> dict[str, str]:
        """Return the settings as the ledger's header keeps them; nothing where none is on."""
        if not self.kinds:
            return {}
        return {
            # In one order, whatever the user's, so that equal choices give equal headers.
            "probes": " ".join(kind for kind in PROBE_KINDS if kind in self.kinds),
            "probe_modules": " ".join(self.probe_modules),
            "probe_steps": self.probe_steps,
        }


def _split(setting: str, names: str | Sequence[str]) -> tuple[str, ...]:
    if isinstance(names, str):
        return tuple(name.strip() for name in names.split(",") if name.strip())
    return read_names(setting, names)


def _parse_steps(text: object) -> range:
    match = _STEPS.fullmatch(text or ":") if isinstance(text, str) else None
    # A range answers `in` by arithmetic, so one without an end costs no more than a short one.
    steps = range(int(match[1] or 0), int(match[2] or sys.maxsize)) if match else range(0)
    if not steps:
        raise SettingError(
            f'probe_steps is {text!r}; allowed: "a:b", global steps from a up to but without b, '
            'a below b. "12:13" is step 12 alone, "100:" all from 100.'
        )
    return steps
