"""Join findings with the alerts of runs and the figures of audits, op by op.

Reads JSON of these kinds:

- an audit of ``d9m audit ops``: ``ops.json``, an object with ``rows``, or ``ops.jsonl``, one row
  per line. A row has ``op``, ``entry`` (the catalog's name, if it differs) and ``conditions``; the
  condition ``default`` has ``spread`` with the fields of ``MeasuredOp``, if it ran;
- a ledger: a file ``rank-N.jsonl``, or a folder of these. A record may have an ``error``: torch's
  alert, which ended the run;
- a list of such objects, or one object per line.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_d9m.errors import SettingError
from lightning_d9m.lint.finding import Finding
from lightning_d9m.patches.catalog.catalog import OPS

_ALERT = re.compile(r"([A-Za-z_]\w*)[^:\n]* does not have a deterministic implementation")
# Affixes that torch's alerts add to the name of an op.
_DRESSING = re.compile(r"(_forward)?(_out)?(_cuda|_gpu|_cpu)?(_template|_max|_kernel)?_?$")

# The catalog's names of ops that audits or torch's alerts call differently.
_ENTRIES = {
    "getitem_backward": "index_put_accumulate",
    "put_accumulate": "put_",
    "take_backward": "put_",
    "scatter_reduce_mean": "scatter_reduce_sum",
    "max_unpool1d": "max_unpool2d",
    "max_unpooling2d": "max_unpool2d",
    "max_unpooling3d": "max_unpool3d",
    "embedding_bag_backward": "embedding_bag_max_backward",
    "quantized_resize": "resize_quantized",
    "scatter_reduce_cuda_kernel": "scatter_with_reduce",
    "scatter_reduce_cuda_prod_": "scatter_reduce_prod",
}


@dataclass(frozen=True)
class MeasuredOp:
    """An audit's figures of an op under torch's default condition."""

    distinct: int
    runs: int
    vs: float | None = None
    vermv: float | None = None
    vc: float | None = None


@dataclass
class OpRow:
    """The findings, alerts and measurements of one op.

    Attributes:
        op: The catalog's name, or the record's.
        lines: The places of its findings.
        alerts: Number of ranks that ended with torch's alert of it.
        measured: An audit's figures, one for each case.
    """

    op: str
    lines: list[str] = field(default_factory=list)
    alerts: int = 0
    measured: list[MeasuredOp] = field(default_factory=list)

    @property
    def worst(self) -> MeasuredOp | None:
        """The case with the most distinct outputs; among equals, with the greatest Vermv."""
        return max(self.measured, key=lambda m: (m.distinct, m.vermv or 0.0), default=None)

    @property
    def evidence(self) -> int:
        """The number of kinds of evidence against the op."""
        varied = any(case.distinct > 1 for case in self.measured)
        return bool(self.lines) + bool(self.alerts) + varied


def read_records(path: Path) -> list[Mapping[str, Any]]:
    """Read a ledger or an audit.

    Raises:
        SettingError: If the path does not exist or is not valid JSON.
    """
    try:
        files = sorted(path.glob("**/*.jsonl")) if path.is_dir() else [path]
        if not files:
            raise SettingError(
                f"{path} does not hold *.jsonl files. Give a ledger's folder or a file."
            )
        return [record for file in files for record in _read_file(file)]
    except OSError as error:
        raise SettingError(
            f"{path} cannot be read: {error.strerror or error}. Give a ledger or an audit's JSON."
        ) from error
    except ValueError as error:
        raise SettingError(f"{path} is not valid JSON: {error}.") from error


def _read_file(path: Path) -> Iterator[Mapping[str, Any]]:
    text = path.read_text(encoding="utf-8")
    try:
        values = [json.loads(text)]
    except json.JSONDecodeError:
        values = [json.loads(line) for line in text.splitlines() if line.strip()]
    for value in values:
        listed = value.get("rows", [value]) if isinstance(value, dict) else value
        yield from (record for record in listed if isinstance(record, dict))


def join_ops(findings: Iterable[Finding], records: Iterable[Mapping[str, Any]]) -> list[OpRow]:
    """Return one row for each op that was found, that raised an alert, or that varied in an audit.

    Returns:
        Rows with the most kinds of evidence first, then by name.
    """
    rows: dict[str, OpRow] = {}

    def row(op: str) -> OpRow:
        return rows.setdefault(op, OpRow(op))

    for finding in findings:
        if finding.op:
            row(finding.op).lines.append(finding.location)
    measured: dict[str, list[MeasuredOp]] = defaultdict(list)
    for record in records:
        if alert := _ALERT.search(str(record.get("error", ""))):
            row(name_alert(alert[1])).alerts += 1
        elif (figures := _read_measured(record)) is not None:
            entry_name = str(record.get("entry") or record["op"])
            measured[_ENTRIES.get(entry_name, entry_name)].append(figures)
    for op, cases in measured.items():
        if op in rows or any(case.distinct > 1 for case in cases):
            row(op).measured += cases
    return sorted(rows.values(), key=lambda entry: (-entry.evidence, entry.op))


def name_alert(kernel: str) -> str:
    """Return the catalog's name of an op from the kernel's name in torch's alert.

    >>> name_alert("adaptive_avg_pool2d_backward_cuda"), name_alert("_histc_cuda")
    ('adaptive_avg_pool2d_backward', 'histc')
    """
    names = {overload.partition(".")[0]: op.name for op in OPS for overload in op.kernels}
    names |= {op.name: op.name for op in OPS}
    bare = kernel.removeprefix("_")
    undressed = _DRESSING.sub("", bare)
    for candidate in (kernel, bare, undressed, f"_{undressed}"):
        if found := _ENTRIES.get(candidate) or names.get(candidate):
            return found
    return kernel


def _read_measured(record: Mapping[str, Any]) -> MeasuredOp | None:
    """Return an audit row's figures under torch's default; None if that did not run."""
    conditions = record.get("conditions")
    default = conditions.get("default") if isinstance(conditions, Mapping) else None
    figures = default.get("spread") if isinstance(default, Mapping) else None
    if not isinstance(figures, Mapping) or "distinct" not in figures or "op" not in record:
        return None
    return MeasuredOp(
        int(figures["distinct"]),
        int(figures.get("runs", 0)),
        *(figures.get(name) for name in ("vs", "vermv", "vc")),
    )
