"""An entry of the catalog."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Literal

OpStatus = Literal["patched", "exempt"]


class FlagEffect(Enum):
    """The effect of ``torch.use_deterministic_algorithms`` on an op."""

    RAISES = "raises"
    """torch raises: it has no deterministic version."""
    SWITCHES = "switches"
    """torch, or the library that it calls, runs a deterministic version."""
    DECOMPOSES = "decomposes"
    """torch replaces the op in the forward pass by ops that have a deterministic version."""
    NONE = "none"
    """The op stays nondeterministic, and torch does not raise."""
    OUT_OF_REACH = "out of reach"
    """The op belongs to another package, which does not read torch's flag."""
    UNNEEDED = "unneeded"
    """The op is deterministic with and without the flag."""


@dataclass(frozen=True, kw_only=True)
class Op:
    """One op that torch leaves, or once left, nondeterministic on CUDA.

    Attributes:
        name: The name by which a user excludes it.
        flag_effect: The effect of deterministic algorithms on the op. The linter chooses its rule
            by it.
        torch_does: The behavior of torch when deterministic algorithms are on.
        cause: The reason why it is nondeterministic.
        instead: The replacement, in a sentence.
        bits: The relation of the replacement's result to torch's.
        reason: The reason why an exempt op needs no patch.
        documented: Its names in the docstring of ``torch.use_deterministic_algorithms``.
        kernels: The replacement of each overload, as ``package.module:function``.
        operators: Names of its operators, if they differ from its name and from ``kernels``.
        since: The first torch release that the entry applies to.
        until: The first torch release that needs no patch; None if there is none yet.
    """

    name: str
    flag_effect: FlagEffect
    torch_does: str
    cause: str
    instead: str = ""
    bits: str = ""
    reason: str = ""
    documented: tuple[str, ...] = ()
    kernels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    operators: tuple[str, ...] = ()
    since: str = "2.11"
    until: str | None = None

    @property
    def status(self) -> OpStatus:
        """``"patched"``, or ``"exempt"`` with a reason."""
        return "patched" if self.kernels else "exempt"

    def is_needed(self, torch_version: str) -> bool:
        """Return whether this entry applies to a release of torch."""
        release = _read_release(torch_version)
        return _read_release(self.since) <= release and (
            self.until is None or release < _read_release(self.until)
        )

    def as_record(self) -> dict[str, object]:
        """Return the entry as JSON types."""
        names = ("name", "status", "torch_does", "cause", "instead", "bits", "reason")
        return {
            **{name: getattr(self, name) for name in (*names, "since", "until")},
            "documented": list(self.documented),
            "overloads": sorted(self.kernels),
        }


def _read_release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
