"""An entry of the catalog."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, Literal

OpStatus = Literal["patched", "offered", "exempt"]

ATOMICS = (
    "One thread per output adds into the input with atomics; the threads that add to one input "
    "have no fixed order, and a floating-point sum depends on the order."
)
"""The cause that most of the ops share."""

LAST_STAYS = "Several threads write to one place in no fixed order, and the last value stays."
"""The cause that writes share."""

EXACT = (
    "Each term is cut into pieces, relative to the greatest exponent of its place, which float64 "
    "adds exactly, in any order."
)
"""The replacement that sums have in common."""

ROUNDED_ONCE = (
    "Rounded once, so within the rounding errors of torch's sum; the same bits in any order and on "
    "every device, but for bits below 2**-40 of the greatest term's last place, which are cut off."
)
"""The result that sums have in common."""


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
        name: The name by which a user excludes or includes it.
        status: ``"patched"`` by default; ``"offered"`` on request, because torch's own version is
            deterministic; ``"exempt"``, with a reason.
        flag_effect: The effect of deterministic algorithms on the op. The linter chooses its rule
            by it.
        documented: Its names in the docstring of ``torch.use_deterministic_algorithms``.
        torch_does: The behavior of torch when deterministic algorithms are on.
        cause: The reason why it is nondeterministic.
        instead: The replacement, in a sentence.
        bits: The relation of the replacement's result to torch's.
        kernels: The replacement of each overload, as ``package.module:function``.
        operators: Names of its operators, if they differ from its name and from ``kernels``.
        since: The first torch release that the entry applies to.
        until: The first torch release that needs no patch; None if there is none yet.
        cost: Time relative to the nondeterministic original; None until measured.
        reason: The reason why an exempt op needs no patch.
    """

    name: str
    status: OpStatus
    flag_effect: FlagEffect
    torch_does: str
    cause: str
    instead: str = ""
    bits: str = ""
    documented: tuple[str, ...] = ()
    kernels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    operators: tuple[str, ...] = ()
    since: str = "2.11"
    until: str | None = None
    cost: str | None = None
    reason: str = ""

    def is_needed(self, torch_version: str) -> bool:
        """Return whether this entry applies to a release of torch."""
        release = _read_release(torch_version)
        return _read_release(self.since) <= release and (
            self.until is None or release < _read_release(self.until)
        )

    def as_record(self) -> dict[str, object]:
        """Return the entry as JSON types."""
        return {
            "name": self.name,
            "status": self.status,
            "documented": list(self.documented),
            "torch_does": self.torch_does,
            "cause": self.cause,
            "instead": self.instead,
            "bits": self.bits,
            "overloads": sorted(self.kernels),
            "since": self.since,
            "until": self.until,
            "cost": self.cost,
            "reason": self.reason,
        }


def make_patched(name: str, kernel: str, overloads: str, documented: str = "", **fields: Any) -> Op:
    """Return the entry of an op that is patched.

    Args:
        name: The op's name.
        kernel: The replacement, ``module:function`` in ``patches/kernels/``.
        overloads: The overloads that it replaces, with blanks between them.
        documented: Its names in torch's documentation, with commas between them.
        **fields: Those that are not of an exact sum in place of atomics that torch refuses.
    """
    path = f"lightning_d9m.patches.kernels.{kernel}"
    defaults: dict[str, Any] = {
        "status": "patched",
        "flag_effect": FlagEffect.RAISES,
        "torch_does": "Raises in the backward pass.",
        "cause": ATOMICS,
        "instead": EXACT,
        "bits": ROUNDED_ONCE,
        "documented": tuple(documented.split(", ")) if documented else (),
        "kernels": MappingProxyType(dict.fromkeys(overloads.split(), path)),
    }
    return Op(name=name, **{**defaults, **fields})


def make_exempt(name: str, documented: str = "", **fields: Any) -> Op:
    """Return the entry of an op that needs no patch, by default because torch switches."""
    defaults: dict[str, Any] = {
        "status": "exempt",
        "flag_effect": FlagEffect.SWITCHES,
        "torch_does": "Runs a deterministic version.",
        "cause": ATOMICS,
        "documented": tuple(documented.split(", ")) if documented else (),
        "reason": "torch itself is deterministic if deterministic algorithms are on.",
    }
    return Op(name=name, **{**defaults, **fields})


def _read_release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
