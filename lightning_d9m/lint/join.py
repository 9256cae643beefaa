"""Join what a scan found with what ran: a run's alerts and an audit's figures, op by op.

What is read, all JSON:

- an audit, as ``d9m audit ops`` writes it: ``ops.json``, an object with ``rows``, or ``ops.jsonl``,
  a line for each row. A row has ``op``, where it differs ``entry`` (the catalog's name), and
  ``conditions``; the one named ``default`` has ``outcome`` and, where it ran, ``spread`` with
  ``distinct``, ``runs``, ``vs``, ``vermv``, ``vc``. A flat row with ``op``, ``arm`` and these
  figures does too;
- a ledger: a file ``rank-N.jsonl``, or a folder of these. Of its records the last one is read: its
  ``error``, where that is torch's alert, which ended the run;
- any list, or lines, of such objects.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_d9m.errors import SettingError
from lightning_d9m.lint.finding import Finding
from lightning_d9m.patches.catalog.catalog import OPS

_ALERT = re.compile(r"([A-Za-z_]\w*)[^:\n]* does not have a deterministic implementation")
# What torch's alerts add to the name of an op.
_DRESSING = re.compile(r"(_forward)?(_out)?(_cuda|_gpu|_cpu)?(_template|_max|_kernel)?_?$")

# What an audit or torch's alert calls an op which the catalogue has under another name.
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
    """What an audit measured of an op in torch's default arm."""

    distinct: int
    runs: int
    vs: float | None = None
    vermv: float | None = None
    vc: float | None = None


@dataclass
class OpRow:
    """One op.

    Attributes:
        op: The catalogue's name, or that of the record.
        lines: Where the scan found it.
        alerts: How many ranks of the runs were ended by torch's alert of it.
        measured: An audit's figures, one for each case.
    """

    op: str
    lines: list[str] = field(default_factory=list)
    alerts: int = 0
    measured: list[MeasuredOp] = field(default_factory=list)

    @property
    def worst(self) -> MeasuredOp | None:
        """The case with the most distinct outputs, and of these that with the greatest Vermv."""
        return max(self.measured, key=lambda m: (m.distinct, m.vermv or 0.0), default=None)

    def as_record(self) -> dict[str, object]:
        """Return the row in the types that JSON knows."""
        return asdict(self)


def read_records(path: Path) -> list[Mapping[str, Any]]:
    """Read a ledger or an audit.

    Raises:
        SettingError: There is nothing there, or it is no JSON.
    """
    try:
        files = sorted(path.glob("**/*.jsonl")) if path.is_dir() else [path]
        if not files:
            raise SettingError(f"{path} holds no file *.jsonl. Give a ledger's folder or a file.")
        return [record for file in files for record in _read_file(file)]
    except OSError as error:
        raise SettingError(
            f"{path} cannot be read: {error.strerror or error}. Give a ledger or an audit's JSON."
        ) from error
    except ValueError as error:
        raise SettingError(f"{path} is no JSON that can be read: {error}.") from error


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
    """Return one row for each op that was found, alerted or measured to vary.

    Args:
        findings: A scan's.
        records: Of ledgers and audits.

    Returns:
        First what was both found and seen to vary, then by name.
    """
    rows: dict[str, OpRow] = {}

    def row(op: str) -> OpRow:
        return rows.setdefault(op, OpRow(op))

    for finding in findings:
        if finding.op:
            row(finding.op).lines.append(finding.place)
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
    return sorted(rows.values(), key=lambda entry: (-_count_signs(entry), entry.op))


def name_alert(kernel: str) -> str:
    """Return the catalogue's name of the op that torch's alert calls by a kernel's name.

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
    """Return the figures of a row of an audit in torch's default arm, if it is one that ran."""
    if "op" not in record:
        return None
    figures: Any = record
    conditions = record.get("conditions", record.get("arms"))  # "arms" in older audits
    if isinstance(conditions, Mapping):
        figures = conditions.get("default", {}).get("spread")
    elif record.get("arm", "default") != "default":
        return None
    if not isinstance(figures, Mapping) or "distinct" not in figures:
        return None
    return MeasuredOp(
        int(figures["distinct"]),
        int(figures.get("runs", 0)),
        *(figures.get(name) for name in ("vs", "vermv", "vc")),
    )


def _count_signs(row: OpRow) -> int:
    varied: Sequence[bool] = [case.distinct > 1 for case in row.measured]
    return bool(row.lines) + bool(row.alerts) + any(varied)
