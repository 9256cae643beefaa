"""``d9m audit inference``: check that a model is repeatable and independent of its batches."""

import argparse
import json
from contextlib import ExitStack
from typing import Any

from lightning_d9m.cli.arguments import declare, whole_number
from lightning_d9m.errors import SettingError
from lightning_d9m.output.terminal import print_wrapped

_SIZES = (2, 3, 4, 5, 7, 8, 16, 32, 64, 128, 256)

_ARGUMENTS = """
target:TARGET  module:function or script.py:function that returns (module, samples)
-n, --runs RUNS  number of evaluations of one batch (default: 10)
--samples SAMPLES  maximum number of samples (default: 32)
--batch-sizes SIZE+  in addition to 1 (default: a range)
--device DEVICE  any torch device (default: cpu)
--threads THREADS  intra-op CPU threads
--deterministic  run in a deterministic session
-o, --output FILE  also write Markdown
--json  print the result as one JSON object
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``d9m audit inference``."""
    size = whole_number(1, 1_000_000)
    declare(
        parser,
        _ARGUMENTS,
        runs={"type": whole_number(2, 10_000), "default": 10},
        samples={"type": whole_number(2, 1_000_000), "default": 32},
        batch_sizes={"type": size},
        device={"default": "cpu"},
        threads={"type": whole_number(1, 4096)},
    )


def run(arguments: argparse.Namespace) -> int:
    """Audit a model; return 0 if it is repeatable and batch-invariant, else 1."""
    if arguments.batch_sizes and max(arguments.batch_sizes) == 1:
        raise SettingError("--batch-sizes is [1]; include at least one size above 1.")
    # Imported here, so that parsing the arguments does not load torch.
    from lightning_d9m.audit.device import check_device
    from lightning_d9m.audit.inference.report import render_markdown, render_text
    from lightning_d9m.control.session import deterministic
    from lightning_d9m.control.torch_flags import threads_pinned

    check_device(arguments.device)
    with ExitStack() as stack:
        stack.enter_context(threads_pinned(arguments.threads))
        if arguments.deterministic:
            stack.enter_context(deterministic())
        result = _audit(arguments)
    if arguments.json:
        print(json.dumps(result, indent=1))
    else:
        print_wrapped(render_text(result).splitlines())
    if arguments.output is not None:
        arguments.output.write_text(render_markdown(result))
    return 0 if result["repeatable"] and result["invariant"] else 1


def _audit(arguments: argparse.Namespace) -> dict[str, Any]:
    import torch

    from lightning_d9m.audit.inference import checks
    from lightning_d9m.audit.inference import modes as inference_modes
    from lightning_d9m.audit.inference.subject import load_subject

    subject = load_subject(arguments.target, arguments.device, arguments.samples)
    count = len(subject.samples)
    sizes = sorted({min(size, count) for size in arguments.batch_sizes or _SIZES} - {1})
    modules = {
        name: checks.ModuleFindings(type(part).__name__)
        for name, part in subject.module.named_modules()
    }
    outputs = checks.check_repeatability(subject, arguments.runs, max(sizes), modules)
    invariance = checks.Invariance(subject, modules)
    for size in sizes:
        invariance.check(size)
    invariance.attribute_breaks(sizes)
    micros = inference_modes.time_modes(subject, max(sizes))
    modes = []
    for mode, evaluate in inference_modes.make_evaluators(subject, max(sizes)).items():
        distinct, differing = inference_modes.count_distinct_outputs(subject, [1, *sizes], evaluate)
        modes.append(
            {
                "mode": mode,
                "outputs": distinct,
                "differing": differing,
                "microseconds": round(micros[mode][0], 2),
                "ratio": round(micros[mode][0] / micros["as it is"][0], 3),
                "ratio_alone": round(micros[mode][1] / micros["as it is"][1], 3),
            }
        )
    first = invariance.first
    return {
        "target": arguments.target,
        "torch": torch.__version__,
        "device": arguments.device,
        "threads": torch.get_num_threads(),
        "deterministic": arguments.deterministic,
        "runs": arguments.runs,
        "samples": count,
        "sizes": sizes,
        "outputs": outputs,
        "repeatable": outputs == 1 and all(found.outputs == 1 for found in modules.values()),
        "invariant": modes[0]["outputs"] == 1,
        "first": None if first is None else vars(first),
        "modules": [
            {
                "name": name,
                "kind": found.kind,
                "repeatability": found.repeatability,
                "outputs": found.outputs,
                "invariance": found.invariance,
                "sizes": sorted(found.sizes),
            }
            for name, found in modules.items()
        ],
        "modes": modes,
    }
