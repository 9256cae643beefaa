"""The catalog: ops that are patched, and ops that need no patch or that no patch can help.

:func:`~lightning_d9m.ops.patches.registration.patches_applied`, ``d9m ops`` and docs/ops.md are
made from it. It does not import torch.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from lightning_d9m.errors import SettingError
from lightning_d9m.text import read_stanzas
from lightning_d9m.version import parse_release

OpStatus = Literal["patched", "exempt"]
_KERNELS = "lightning_d9m.ops.patches.kernels"


class FlagEffect(Enum):
    """The effect of ``torch.use_deterministic_algorithms`` on an op."""

    RAISES = "raises"  # torch raises: it has no deterministic version
    SWITCHES = "switches"  # torch, or a library that it calls, runs a deterministic version
    DECOMPOSES = "decomposes"  # the forward pass consists of ops that have a deterministic version
    NONE = "none"  # the op stays nondeterministic, and torch does not raise
    OUT_OF_REACH = "out of reach"  # the op's package does not read torch's flag
    UNNEEDED = "unneeded"  # the op is deterministic with and without the flag


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
        alerts: Its names in the messages in which torch or torchvision refuses it.
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
    alerts: tuple[str, ...] = ()
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
        # Two numbers decide, so that a nightly build counts as its release.
        release, until = parse_release(torch_version), parse_release(self.until or "999.0")
        return parse_release(self.since) <= release < until

    def as_record(self) -> dict[str, object]:
        """Return the entry as JSON types."""
        names = ("name", "status", "torch_does", "cause", "instead", "bits", "reason")
        return {
            **{name: getattr(self, name) for name in (*names, "since", "until")},
            "documented": list(self.documented),
            "alerts": list(self.alerts),
            "overloads": sorted(self.kernels),
        }


def read_ops(path: Path) -> Iterator[Op]:
    """Return the ops of stanzas, in which each op of a stanza has all of its fields.

    An op has a name, overloads, names in torch's documentation, without ``torch.``, and those in
    messages. Of the overloads, ``*`` stands for the name, and ``a{,.out}`` for ``a a.out``. Their
    replacement is the function of the module ``kernel`` that has the operator's name, without
    underscores around it.
    """
    # The first stanza has the texts that others share.
    shared, *stanzas = read_stanzas(path)
    texts = {name: value for name, [value] in shared.items()}
    for stanza in stanzas:
        lines = stanza.pop("op")
        fields = {
            # Words in capitals that name a shared text; others, such as CUDA, stay.
            name: re.sub("[A-Z_]+", lambda word: texts.get(word[0], word[0]), value)
            for name, [value] in stanza.items()
        }
        for line in lines:
            yield _make_op(line, fields, texts)


def _make_op(line: str, fields: Mapping[str, str], shared: Mapping[str, str]) -> Op:
    name, overloads, documented, alerts = map(str.strip, f"{line} | | | ".split("|")[:4])
    flag = FlagEffect(fields.get("flag", "raises"))
    module = fields.get("kernel")
    found = [
        f"{packet}{ending}"
        for packet, endings in re.findall(r"([^\s{]+)(?:\{(.*?)\})?", overloads.replace("*", name))
        for ending in endings.split(",")
    ]
    # An overload with out= has the function of the one without: the dispatcher's call writes the
    # result.
    kernels = {one: f"{_KERNELS}.{module}:{one.partition('.')[0].strip('_')}" for one in found}
    return Op(
        name=name,
        flag_effect=flag,
        torch_does=fields.get("torch") or shared[flag.value],
        cause=fields.get("why") or shared["ATOMICS"],
        instead=fields.get("instead", shared["EXACT"] if kernels else ""),
        bits=fields.get("bits", shared["bits"] if kernels else ""),
        reason=fields.get("reason", "" if kernels else shared["reason"]),
        alerts=tuple(filter(None, alerts.split(", "))),
        documented=tuple(f"torch.{one}" for one in documented.split(", ") if one),
        kernels=MappingProxyType(kernels),
        operators=tuple(filter(None, fields.get("operators", "").split(", "))),
        since=fields.get("since", "2.11"),
        until=fields.get("until"),
    )


OPS: tuple[Op, ...] = tuple(
    sorted(read_ops(Path(__file__).with_name("ops.txt")), key=lambda op: op.name)
)


def find_op(name: str) -> Op:
    """Return the op with a name.

    Raises:
        SettingError: The catalog has no such op.
    """
    for op in OPS:
        if op.name == name:
            return op
    # A user may write put for put_.
    near = [op.name for op in OPS if name.strip("_") in op.name]
    raise SettingError(
        f"The catalog has no op {name!r}. "
        + (f"Similar: {', '.join(near)}. " if near else "")
        + "`d9m ops` lists the names."
    )


def search_op(text: str) -> Op:
    """Return the op with a name, with a name in torch's messages, or that alone has such a part.

    Raises:
        SettingError: No op, or several ones, match.
    """
    word = text.partition(" ")[0]
    # A message of torch holds the exact name, which may be a part of another one.
    for exact in (True, False):
        for part in filter(None, dict.fromkeys((word, word.strip("_")))):
            found = [op for op in OPS if _is_called(op, part, exact=exact)]
            if len(found) == 1:
                return found[0]
    return find_op(text)


def _is_called(op: Op, part: str, *, exact: bool) -> bool:
    names = (op.name, *op.alerts, *op.documented)
    return part in names if exact else any(part in name for name in names)


def select_ops(torch_version: str, exclude: Iterable[str] = ()) -> tuple[Op, ...]:
    """Return the ops to patch.

    Args:
        torch_version: ``torch.__version__``. Ops that need no patch in this version are skipped.
        exclude: Names of ops to leave to torch.

    Raises:
        SettingError: A name is not in the catalog, or the op has no replacement.
    """
    excluded = set(exclude)
    for name in sorted(excluded):
        op = find_op(name)
        if not op.kernels:
            raise SettingError(
                f"{name!r} cannot be excluded, because nothing replaces it: {op.reason}"
            )
    return tuple(
        op for op in OPS if op.kernels and op.name not in excluded and op.is_needed(torch_version)
    )
