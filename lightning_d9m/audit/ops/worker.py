"""The worker process of ``d9m audit ops``: if an op crashes it, the audit continues.

It reads one line of JSON for each case, and writes one line with what it measured. What a library
prints goes to standard error.
"""

import json
import os
import sys

import torch

from lightning_d9m.audit.ops.cases import list_cases
from lightning_d9m.audit.ops.conditions import Budget, measure_case


def main() -> int:
    """Measure the cases that standard input requests; return 0 after the last one."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.readline())
    if settings["threads"] is not None:
        torch.set_num_threads(settings["threads"])
    budget = Budget(settings["runs"], settings["seconds"])
    cases = {case.key(dtype): (case, dtype) for case in list_cases() for dtype in case.dtypes}
    print(json.dumps(list(cases)), file=answers, flush=True)
    for line in sys.stdin:
        case, dtype = cases[json.loads(line)]
        conditions = measure_case(case, settings["device"], dtype, budget)
        print(json.dumps(conditions), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
