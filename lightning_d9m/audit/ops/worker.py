"""The worker process of ``d9m audit ops``: if an op crashes it, the audit continues.

It reads one JSON object from standard input, and writes one line of JSON for each event.
"""

import json
import sys
from collections.abc import Iterator
from difflib import get_close_matches
from fnmatch import fnmatch
from typing import Any

import torch

from lightning_d9m.audit.device import check_device
from lightning_d9m.audit.ops.case import Case
from lightning_d9m.audit.ops.cases import list_cases
from lightning_d9m.audit.ops.conditions import Budget, begin_row, measure_case
from lightning_d9m.errors import D9mError, SettingError
from lightning_d9m.patches.catalog.torch_docs import find_documented_lines, read_documentation


def plan_cases(
    patterns: list[str], dtypes: list[str], *, quick: bool
) -> Iterator[tuple[Case, str]]:
    """Yield each case to measure, with each of its dtypes.

    Raises:
        SettingError: A pattern matches no op.
    """
    names = {case.op for case in list_cases()}
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in names):
            alike = get_close_matches(pattern, sorted(names), n=1)
            hint = f"Did you mean {alike[0]}? " if alike else ""
            raise SettingError(
                f"--ops contains {pattern!r}, which matches no op of the audit. {hint}The ops are: "
                f"{', '.join(sorted(names))}."
            )
    for case in list_cases():
        if quick and not case.quick:
            continue
        if patterns and not any(fnmatch(case.op, pattern) for pattern in patterns):
            continue
        for dtype in dtypes:
            # An op that exists in one dtype only is measured in it for any request.
            if dtype in case.dtypes or (len(case.dtypes) == 1 and dtype == dtypes[0]):
                yield case, dtype if dtype in case.dtypes else case.dtypes[0]


def main() -> int:
    """Measure the cases that standard input requests; return 0 after the last one."""
    settings: dict[str, Any] = json.loads(sys.stdin.read())
    if settings["threads"] is not None:
        torch.set_num_threads(settings["threads"])
    try:
        check_device(settings["device"])
        plan = list(plan_cases(settings["ops"], settings["dtypes"], quick=settings["quick"]))
        lines = read_documentation(torch.use_deterministic_algorithms.__doc__ or "")
    except D9mError as error:
        _send("problem", str(error))
        return 2
    known = {name for case in list_cases() for name in case.documented}
    _send(
        "facts",
        {
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "unknown": [
                line.text
                for line in lines
                if not find_documented_lines((line,), known, (line.devices or ("cpu",))[0])
            ],
        },
    )
    _send("plan", [case.key(dtype) for case, dtype in plan])
    done = set(settings["done"])
    budget = Budget(settings["runs"], settings["seconds"])
    for case, dtype in plan:
        if case.key(dtype) not in done:
            begun = begin_row(case, settings["device"], dtype, lines)
            _send("begin", begun)
            conditions = measure_case(case, settings["device"], dtype, budget)
            _send("row", {**begun, "conditions": conditions})
    return 0


def _send(event: str, value: object) -> None:
    print(json.dumps({"event": event, "value": value}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
