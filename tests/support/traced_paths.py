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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

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
def traced(log: Path) -> Iterator[None]:
    """Append each function of the package that is entered to a file, in forked processes too."""
    seen = set()

    def note(frame: FrameType, event: str, _: object) -> None:
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
        threading.setprofile(None)  # type: ignore[arg-type]  # typeshed lacks None


def in_hook(name: str, call: Callable[[int], object]) -> L.Callback:
    """Make a callback whose one hook passes on the number of steps."""
    callback = L.Callback()
    setattr(callback, name, lambda trainer, *_: call(trainer.global_step))
    return callback


def trace_fit(log: Path, first: str, last: str, strategy: object = "auto") -> None:
    """Trace one time from one hook to the next call of another, around the callback's own."""
    with ExitStack() as stack:

        def start(step: int) -> None:
            if step >= STEP and not log.exists():
                stack.enter_context(traced(log))

        callbacks = [
            in_hook(first, start),
            DeterminismCallback(seed=1),
            in_hook(last, lambda _: stack.close()),
        ]
        words = {"default_root_dir": log.parent, "max_epochs": 1, "strategy": strategy}
        trainer = L.Trainer(callbacks=callbacks, **words, **QUIET)
        trainer.fit(make_model(), make_loader(size=256))


def trace_seed(log: Path) -> None:
    """Trace a fit from its start to its first batch, which a worker loads."""
    with ExitStack() as stack:
        stack.enter_context(traced(log))
        stop = in_hook("on_train_batch_start", lambda _: stack.close())
        callbacks = [DeterminismCallback(seed=1), stop]
        trainer = L.Trainer(callbacks=callbacks, max_steps=1, default_root_dir=log.parent, **QUIET)
        trainer.fit(make_model(), make_loader(num_workers=1))


def trace_digest(log: Path) -> None:
    trace_fit(log, "on_train_epoch_end", "on_train_epoch_end")


def trace_horovod(log: Path) -> None:
    """Trace a step of one of two processes."""
    hooks = '"on_train_batch_start", "on_train_batch_end", "horovod_d9m"'
    code = f"import pathlib, traced_paths as t; t.trace_fit(pathlib.Path({str(log)!r}), {hooks})"
    horovodrun = Path(sys.executable).with_name("horovodrun")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    command = [horovodrun, "-np", "2", sys.executable, "-c", code]
    subprocess.run(command, env=environment, check=True, capture_output=True)


def trace_logical_ranks(log: Path) -> None:
    """Trace a step of one process with two logical ranks."""
    strategy = DDPDeterministicStrategy(logical_ranks=2)
    trace_fit(log, "on_train_batch_start", "on_train_batch_end", strategy)


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


def trace_locate(log: Path) -> None:
    """Trace the command, without the processes that it starts."""
    program = log.with_name("noise.py")
    program.write_text(NOISE)
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    os.chdir(log.parent)
    with traced(log):
        main(["locate", "--", sys.executable, str(program)])


TRACES = [trace_seed, trace_digest, trace_horovod, trace_logical_ranks, trace_locate]


def read_trace(log: Path) -> set[tuple[str, ...]]:
    return {tuple(line.split()) for line in log.read_text().splitlines()}


def run() -> None:
    """Print for each path, or for the given ones, what the page and what a trace say."""
    paths = PATH.findall((ROOT / "CONTRIBUTING.md").read_text())
    for (name, count, _, text), trace in zip(paths, TRACES, strict=True):
        if trace.__name__ not in (sys.argv[1:] or [trace.__name__]):
            continue
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "trace")
            trace(log)
            entered = read_trace(log)
        files = {file for file, _ in entered}
        print(f"{name}: {count} files, {len(files)} entered, with {len(entered)} functions")
        print("    not entered:", *sorted({*FILE.findall(text)} - files))


if __name__ == "__main__":
    run()
