"""The catalog: ops that are patched, and ops that need no patch or that no patch can help.

:func:`~lightning_d9m.patches.registration.patches_applied`, ``d9m ops`` and docs/ops.md are made
from it. It does not import torch.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from lightning_d9m.errors import SettingError
from lightning_d9m.patches.catalog.op import FlagEffect, Op

_KERNELS = "lightning_d9m.patches.kernels"


def read_ops(text: str) -> Iterator[Op]:
    """Return the ops of stanzas, in which each op of a stanza has all of its fields.

    An op has a name, overloads and names in torch's documentation, without ``torch.``. Of the
    overloads, ``*`` stands for the name, and ``a{,.out}`` for ``a a.out``. Their replacement is the
    function of the module ``kernel`` that has the operator's name, without underscores around it.
    """
    _, shared, *stanzas = map(_read_fields, text.strip().split("\n\n"))
    texts = {name: value for name, [value] in shared.items()}
    for stanza in stanzas:
        lines = stanza.pop("op")
        fields = {
            name: re.sub("[A-Z_]+", lambda word: texts.get(word[0], word[0]), value)
            for name, [value] in stanza.items()
        }
        for line in lines:
            yield _make_op(line, fields, texts)


def _read_fields(stanza: str) -> dict[str, list[str]]:
    fields: dict[str, list[str]] = {}
    for line in re.split(r"\n(?! )", stanza):
        name, _, value = " ".join(line.split()).partition(":")
        fields.setdefault(name, []).append(value.strip())
    return fields


def _make_op(line: str, fields: Mapping[str, str], shared: Mapping[str, str]) -> Op:
    name, overloads, documented = (part.strip() for part in f"{line} | | ".split("|")[:3])
    flag = FlagEffect(fields.get("flag", "raises"))
    module = fields.get("kernel")
    found = [
        f"{packet}{ending}"
        for packet, endings in re.findall(r"([^\s{]+)(?:\{(.*?)\})?", overloads.replace("*", name))
        for ending in endings.split(",")
    ]
    kernels = {one: f"{_KERNELS}.{module}:{one.partition('.')[0].strip('_')}" for one in found}
    return Op(
        name=name,
        flag_effect=flag,
        torch_does=fields.get("torch") or shared[flag.value],
        cause=fields.get("why") or shared["ATOMICS"],
        instead=fields.get("instead", shared["EXACT"] if kernels else ""),
        bits=fields.get("bits", shared["bits"] if kernels else ""),
        reason=fields.get("reason", "" if kernels else shared["reason"]),
        documented=tuple(f"torch.{one}" for one in documented.split(", ") if one),
        kernels=MappingProxyType(kernels),
        operators=tuple(filter(None, fields.get("operators", "").split(", "))),
        since=fields.get("since", "2.11"),
    )


OPS: tuple[Op, ...] = tuple(
    sorted(
        read_ops(Path(__file__).with_name("ops.txt").read_text(encoding="utf-8")),
        key=lambda op: op.name,
    )
)


def find_op(name: str) -> Op:
    """Return the op with a name.

    Raises:
        SettingError: The catalog has no such op.
    """
    for op in OPS:
        if op.name == name:
            return op
    near = [op.name for op in OPS if name.strip("_") in op.name]
    raise SettingError(
        f"The catalog has no op {name!r}. "
        + (f"Similar: {', '.join(near)}. " if near else "")
        + "`d9m ops` lists the names."
    )


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
