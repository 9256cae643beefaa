"""The five paths of CONTRIBUTING, as a trace of a training sees them: its files and functions.

``python tests/support/traced_paths.py`` prints a line for each path. What a page says about the
path of a thing is read from the code; this is what the interpreter enters on that way, with all
that stands around it.
"""

import os
import re
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import lightning.pytorch as L
from trainings import QUIET, make_loader, make_model

from lightning_d9m import DDPDeterministicStrategy, DeterminismCallback
from lightning_d9m.tools.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = str(ROOT / "lightning_d9m") + "/"
PATH = re.compile(
    r"^```text\n([^\n]+): (\d+) files \(goal \d+; (\d+) entered\)\n\n(.*?)^```",
    re.DOTALL | re.MULTILINE,
)
FILE = re.compile(r"^(?:→ )?([a-z0-9_/]+\.py)\b", re.MULTILINE)
STEP = 4  # the first three steps record more, and the last of the six ends the epoch


@contextmanager
def traced(log):
    """Append each function of the package that is entered to a file, in forked processes too."""
    seen = set()

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code not in seen:
            seen.add(code)
            with log.open("a") as file:
                file.write(f"{code.co_filename[len(PACKAGE) :]} {code.co_name}\n")

    log.touch()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def trace_fit(log, last, first=None, strategy="auto", workers=0):
    """Trace one time from a hook, or from the start, to the next call of another hook.

    The hooks are those of callbacks around ours.
    """
    before, after = L.Callback(), L.Callback()
    with ExitStack() as stack:

        def start(trainer, *_):
            if trainer.global_step >= STEP and not log.exists():
                stack.enter_context(traced(log))

        setattr(after, last, lambda *_: stack.close())
        if first is None:
            stack.enter_context(traced(log))
        else:
            setattr(before, first, start)
        callbacks = [before, DeterminismCallback(seed=1), after]
        words = {"default_root_dir": log.parent, "max_epochs": 1, "strategy": strategy}
        trainer = L.Trainer(callbacks=callbacks, **words, **QUIET)
        trainer.fit(make_model(), make_loader(size=256, num_workers=workers))


STEP_HOOKS = "on_train_batch_end", "on_train_batch_start"


def trace_horovod(log):
    """Trace a step of one of two processes."""
    words = f"pathlib.Path({str(log)!r}), *t.STEP_HOOKS, 'horovod_d9m'"
    code = f"import pathlib, traced_paths as t; t.trace_fit({words})"
    horovodrun = Path(sys.executable).with_name("horovodrun")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    command = [horovodrun, "-np", "2", sys.executable, "-c", code]
    subprocess.run(command, env=environment, check=True, capture_output=True)


def trace_logical_ranks(log):
    """Trace a step of one process with two logical ranks."""
    trace_fit(log, *STEP_HOOKS, DDPDeterministicStrategy(logical_ranks=2))


NOISE = """
import os
import lightning.pytorch as L
import torch
from trainings import QUIET, make_loader, make_model
from lightning_d9m import DeterminismCallback
model = make_model()
noise = int.from_bytes(os.urandom(2), "big") / 65536
model.on_before_optimizer_step = lambda *_: model.layers[0].bias.grad.add_(noise)
trainer = L.Trainer(max_epochs=1, callbacks=[DeterminismCallback(seed=1)], **QUIET)
trainer.fit(model, make_loader())
"""


def trace_locate(log):
    """Trace the command, without the processes that it starts."""
    program = log.with_name("noise.py")
    program.write_text(NOISE)
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    os.chdir(log.parent)
    with traced(log):
        main(["locate", "--", sys.executable, str(program)])


TRACES = {
    "seed": partial(trace_fit, last="on_train_batch_start", workers=1),
    "digest": partial(trace_fit, last="on_train_epoch_end", first="on_train_epoch_end"),
    "horovod": trace_horovod,
    "logical": trace_logical_ranks,
    "locate": trace_locate,
}


def read_trace(log):
    return {tuple(line.split()) for line in log.read_text().splitlines()}


def run():
    """Print for each path, or for the given ones, what the page and what a trace say."""
    paths = PATH.findall((ROOT / "CONTRIBUTING.md").read_text())
    for (name, count, _, text), trace in zip(paths, TRACES, strict=True):
        if trace not in (sys.argv[1:] or TRACES):
            continue
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "trace")
            TRACES[trace](log)
            entered = read_trace(log)
        files = {file for file, _ in entered}
        print(f"{name}: {count} files, {len(files)} entered, with {len(entered)} functions")
        print("    not entered:", *sorted({*FILE.findall(text)} - files))


if __name__ == "__main__":
    run()
