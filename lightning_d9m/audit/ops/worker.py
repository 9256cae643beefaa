"""The process that ``d9m audit ops`` measures in: an op that ends it ends not the audit.

It reads one JSON object from standard input, and writes one line of JSON for each event.
"""

import json
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from typing import Any

import torch

from lightning_d9m.audit.device import check_device
from lightning_d9m.audit.ops.arms import Budget, begin_row, measure_case
from lightning_d9m.audit.ops.case import Case
from lightning_d9m.audit.ops.cases import list_cases
from lightning_d9m.errors import D9mError, SettingError
from lightning_d9m.patches.catalog.torch_docs import find_lines, read_documentation


def plan_cases(
    patterns: list[str], dtypes: list[str], *, quick: bool
) -> Iterator[tuple[Case, str]]:
    """Yield each case with each dtype that is to be measured.

    Args:
        patterns: Names of ops, with ``*``; none for all.
        dtypes: Names of dtypes.
        quick: Leave out the larger cases.

    Raises:
        SettingError: When a pattern matches no op.
    """
    names = {case.op for case in list_cases()}
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in names):
            raise SettingError(
                f"--ops names {pattern!r}, which is no op of the audit. The ops are: "
                f"{', '.join(sorted(names))}."
            )
    for case in list_cases():
        if quick and not case.quick:
            continue
        if patterns and not any(fnmatch(case.op, pattern) for pattern in patterns):
            continue
        for dtype in dtypes:
            # An op of one dtype alone is measured in it, whatever was asked for.
            if dtype in case.dtypes or (len(case.dtypes) == 1 and dtype == dtypes[0]):
                yield case, dtype if dtype in case.dtypes else case.dtypes[0]


def main() -> int:
    """Measure what standard input asks for; return 0 when all of it has been measured."""
    settings: dict[str, Any] = json.loads(sys.stdin.read())
    if settings["threads"] is not None:
        torch.set_num_threads(settings["threads"])
    try:
        check_device(settings["device"])
        plan = list(plan_cases(settings["ops"], settings["dtypes"], quick=settings["quick"]))
        lines = read_documentation(torch.use_deterministic_algorithms.__doc__ or "")
    except D9mError as error:
        _say("problem", str(error))
        return 2
    known = {name for case in list_cases() for name in case.documented}
    _say(
        "facts",
        {
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "unknown": [
                line.text
                for line in lines
                if not find_lines((line,), known, (line.devices or ("cpu",))[0])
            ],
        },
    )
    _say("plan", [case.key(dtype) for case, dtype in plan])
    done = set(settings["done"])
    budget = Budget(settings["runs"], settings["seconds"])
    for case, dtype in plan:
        if case.key(dtype) not in done:
            begun = begin_row(case, settings["device"], dtype, lines)
            _say("begin", begun)
            _say("row", {**begun, "arms": measure_case(case, settings["device"], dtype, budget)})
    return 0


def _say(event: str, value: object) -> None:
    print(json.dumps({"event": event, "value": value}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
