"""``d9m audit ops``: measure every op that may be nondeterministic."""

import argparse
import json
from pathlib import Path
from typing import Any

from lightning_d9m.tools.audit.ops.report import (
    find_problems,
    list_findings,
    render_markdown,
    summarize,
)
from lightning_d9m.tools.cli.arguments import whole_number
from lightning_d9m.tools.output.columns import print_result
from lightning_d9m.tools.output.terminal import wrap_on_terminal

DTYPES = ("float32", "float64", "bfloat16", "float16")
_QUICK_SECONDS, _SECONDS = 0.25, 30.0
ARGUMENTS = """
what:{ops}  what is measured: every op that may be nondeterministic
--device DEVICE  any torch device (default: cpu)
--quick  small cases, float32, 30 runs: under two minutes
-n, --runs RUNS  number of runs of each case (default: 100; 30 with --quick)
--ops NAME+  only these ops; * matches anything
--dtypes DTYPE+  dtypes among float32, float64, bfloat16, float16 (default: all; float32 with
    --quick)
--threads THREADS  intra-op CPU threads (default: torch's)
-o, --output DIR  folder of the audit; continues one that was interrupted (default: d9m-audit/...)
--json  print the audit as one JSON object
"""
EXAMPLE = "d9m audit ops --quick"
SETTINGS: dict[str, dict[str, object]] = {
    "what": {"metavar": "ops"},
    "device": {"default": "cpu"},
    "runs": {"type": whole_number(2, 1_000_000)},
    "ops": {"default": []},
    "dtypes": {"choices": DTYPES},
    "threads": {"type": whole_number(1)},
}


def run(arguments: argparse.Namespace) -> int:
    """Measure, write rows, JSON and Markdown; return 0 if patched ops ran, and none varied."""
    # Imported here, so that parsing the arguments does not load torch.
    from lightning_d9m.tools.audit.ops.measurement import measure_rows, plan_rows

    quick = arguments.quick
    settings: dict[str, Any] = {
        "device": arguments.device,
        "quick": quick,
        "runs": arguments.runs or (30 if quick else 100),
        "seconds": _QUICK_SECONDS if quick else _SECONDS,
        "ops": sorted(arguments.ops),
        "dtypes": list(arguments.dtypes or (DTYPES[:1] if quick else DTYPES)),
        "threads": arguments.threads,
    }
    plan, facts = plan_rows(settings)
    name = f"ops-{arguments.device.replace(':', '')}{'-quick' if quick else ''}"
    folder = arguments.output or Path("d9m-audit") / name
    settings |= facts
    summary = summarize(settings, measure_rows(folder, plan, settings))
    (folder / "ops.json").write_text(json.dumps(summary, indent=1) + "\n")
    (folder / "ops.md").write_text(render_markdown(summary))
    lines = wrap_on_terminal(list_findings(summary))
    print_result(arguments.format, summary, [*lines, f"audit: {folder / 'ops.md'}, ops.json"])
    return 1 if find_problems(summary["rows"]) else 0
