"""Segments of runs: which wrong runs `d9m check` rejects, and what it costs.

    python benchmarks/segments.py kinds [NAME ...]    wrong runs, each with all of its segments
    python benchmarks/segments.py honest [PYTHON]     runs that the programs themselves have made
    python benchmarks/segments.py flips 1000          a flipped bit in each segment of a run
    python benchmarks/segments.py steps 100000        a long run without a difference
    python benchmarks/segments.py cost 50 --segments 3              the time of a check
    python benchmarks/segments.py cost 500 --segments all --jobs 2
    python benchmarks/segments.py goto 50                           arrival at a step
    python benchmarks/segments.py locate first|step|validation|rare the time of a search

The programs of the first four are forks of a process that has imported torch and Lightning. Those
of the others are not: their starts count, and are shown. With PYTHON, which has the libraries of
``wild/requirements.txt``, ``honest`` trains the programs in ``wild/``. What is measured is kept in
``results/segments.json``.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from measurement import RESULTS, describe_machine, keep

ROOT = Path(__file__).parents[1]
SUPPORT = ROOT / "tests" / "support"
sys.path.insert(0, str(SUPPORT))
from forking_python import shared_python  # noqa: E402 - tests are not installed

PROGRAM = SUPPORT / "checked_training.py"
TRAINED = (
    *("label", "input", "rate", "beta", "seed", "swapped epoch", "skipped batch", "repeated batch"),
    *("extra step", "early end", "loss", "dropout", "momentum", "batch size", "weight bit"),
    *("gradient bit", "state bit", "batch bit", "generator", "decay", "schedule", "precision"),
    *("frozen", "clipped", "accumulated", "initial weight", "logged"),
)


# A training of 2,000 steps of some 30 ms on one core.
COSTLY = """
import sys, time
import lightning as L, torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_d9m import DeterminismCallback

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6)))
    def training_step(self, batch, _):
        return self.layers(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

folder, every = sys.argv[1:]
L.seed_everything(1)
data = torch.randn(8192, 512)
saving = ModelCheckpoint(f"{folder}/saved", save_top_k=-1, every_n_train_steps=int(every))
options = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
callbacks = [DeterminismCallback(ledger_dir=folder), saving]
trainer = L.Trainer(max_steps=2000, accelerator="cpu", callbacks=callbacks, **options)
start = time.monotonic()
trainer.fit(Net(), torch.utils.data.DataLoader(data, 512, shuffle=True))
print("fit", time.monotonic() - start)
"""


def edit_ledger(ledger: Path, edit: Callable[[list[dict[str, Any]]], object]) -> None:
    """Edit the records of a ledger, and make the checks of all records again."""
    from lightning_d9m.engine.ledger.format.records import CHAIN_START, chain_record

    records = [json.loads(line) for line in ledger.read_text().splitlines()]
    edit(records)
    check, lines = CHAIN_START, list[bytes]()
    for record in records:
        record.pop("check", None)
        body = json.dumps(record, separators=(",", ":")).encode()
        line, check = chain_record(body, check)
        lines.append(line)
    ledger.write_bytes(b"".join(lines))


def change_checkpoint(path: Path) -> None:
    """Move a weight to the next number, and make the manifest again."""
    import torch

    from lightning_d9m.engine.hashing.checkpoint_manifest import make_manifest
    from lightning_d9m.integrations.lightning.saved_state import (
        MANIFEST_KEY,
        find_state,
        load_checkpoint,
    )

    checkpoint = load_checkpoint(path)
    weight = checkpoint["state_dict"]["layers.1.weight"]
    weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(torch.inf))
    state = find_state(checkpoint)
    state.pop(MANIFEST_KEY)
    state[MANIFEST_KEY] = make_manifest(checkpoint)
    torch.save(checkpoint, path)


def list_edits(other: Path) -> dict[str, Callable[[Path], object]]:
    """Return changes of an honest run's files by name; ``other`` is the folder of another run."""
    ledger = "fit-000/rank-0.jsonl"

    def change_digest(record: dict[str, Any]) -> None:
        record["totals"]["weights"] = record["totals"]["weights"][::-1]

    def saved(folder: Path, step: int) -> Path:
        return folder / f"saved/step={step}.ckpt"

    def find(records: list[dict[str, Any]], kind: str, step: int) -> dict[str, Any]:
        return next(own for own in records if own["kind"] == kind and own.get("step") == step)

    def edit(kind: str, step: int, change: Callable[[dict[str, Any]], object]) -> Any:
        return lambda folder: edit_ledger(
            folder / ledger, lambda records: change(find(records, kind, step))
        )

    def remove(folder: Path) -> None:
        def leave_out(records: list[dict[str, Any]]) -> None:
            records[:] = [own for own in records if own["kind"] != "step" or own["step"] < 46]

        edit_ledger(folder / ledger, leave_out)

    return {
        "ulp in a checkpoint": lambda folder: change_checkpoint(saved(folder, 30)),
        "checkpoint of another run": lambda folder: shutil.copy(
            saved(other, 30), saved(folder, 30)
        ),
        "checkpoint of another step": lambda folder: shutil.copy(
            saved(folder, 45), saved(folder, 30)
        ),
        "final digest edited": edit("digests", 60, change_digest),
        "step's digest edited": edit("step", 31, change_digest),
        "loss edited": edit("digests", 40, lambda own: own.update(loss=(0.5).hex())),
        "records removed": remove,
    }


def train(python: str, folder: Path, **variables: str) -> None:
    """Run the program."""
    environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", **variables}
    words = [python, str(PROGRAM), str(folder)]
    subprocess.run(words, env=environment, check=True, capture_output=True)


def check(python: str, folder: Path) -> dict[str, Any]:
    """Check all segments of a run with the honest program."""
    command = [sys.executable, "-m", "lightning_d9m", "check", str(folder), "--segments", "all"]
    command += ["--json", "-o", str(folder.with_name(f"{folder.name}-check"))]
    words = [*command, "--", python, str(PROGRAM), str(folder.with_name("again"))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if not done.stdout:
        return {"verdict": "error", "checked": [], "error": done.stderr[-300:]}
    return {"status": done.returncode, **json.loads(done.stdout)}


def measure_kinds(*names: str) -> dict[str, Any]:
    """Print how each wrong run is rejected, and count those that are not."""
    python, accepted = shared_python(), 0
    with tempfile.TemporaryDirectory() as root:
        honest, other = Path(root, "honest"), Path(root, "other")
        train(python, honest)
        train(python, other, WRONG="rate")
        edits = list_edits(other)
        for name in names or ["", *TRAINED, *edits]:
            folder = Path(root, name.replace(" ", "-") or "right")
            if name in edits:
                shutil.copytree(honest, folder)
                edits[name](folder)
            else:
                train(python, folder, WRONG=name)
            found = check(python, folder)
            accepted += (found["verdict"] == "equal") != (name == "")
            print(f"{name or 'honest'}: {found['verdict']}", found.get("error", ""), flush=True)
            for own in (own for own in found["checked"] if own["verdict"] != "equal"):
                place = f"steps {own['first']} to {own['last']}"
                print(f"  {own['verdict']}, {place}: {own['where'] or own['reason'][-300:]}")
    return {"runs": len(names or (*TRAINED, *edits)), "missed": accepted}


# Programs of which each is trained in each of these ways.
EXAMPLES = (
    *("examples/digits.py --epochs 2", "examples/graph.py", "examples/segmentation.py --epochs 1"),
    *("examples/logical_ranks.py", "examples/plain_torch.py", "examples/fabric.py"),
    *("examples/accelerate_loop.py", "examples/transformers_trainer.py"),
    "tests/support/gallery_training.py none",
)
WAYS = ({}, {"LIGHTNING_D9M_PORTABLE": "1"}, {"LIGHTNING_D9M_PER_SAMPLE_RNG": "1"})


def list_honest(wild: str) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Yield commands of trainings, and their variables.

    Those of ``checked_training.py`` are of ``kinds``: the change is part of the program here.
    """
    if wild:
        for path in sorted((ROOT / "benchmarks/wild").glob("*_*.py")):
            yield [wild, str(path)], {"PYTHONPATH": str(ROOT)}
        return
    for name in ("", *TRAINED):
        yield [shared_python(), str(PROGRAM), "saved"], {"WRONG": name}
    for way in WAYS:
        for words in EXAMPLES:
            script, *options = words.split()
            yield [shared_python(), str(ROOT / script), *options], way


def measure_honest(wild: str = "") -> dict[str, Any]:
    """Check runs of different programs with the program that has made them, and count failures."""
    runs = accepted = 0
    for words, variables in list_honest(wild):
        with tempfile.TemporaryDirectory() as root:
            environment = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "LIGHTNING_D9M": "1"}
            environment |= {"LIGHTNING_D9M_LEDGER_DIR": f"{root}/run", **variables}
            options: dict[str, Any] = {"cwd": root, "capture_output": True, "text": True}
            options["env"] = os.environ | environment
            done = subprocess.run(words, check=False, **options)
            ledgers = sorted(Path(root).glob("*/fit-000"))
            command = [sys.executable, "-m", "lightning_d9m", "check", "--segments", "all"]
            command += ["--json", "-o", "check", *map(str, ledgers), "--", *words]
            found = subprocess.run(command, check=False, **options) if ledgers else done
            runs, is_equal = runs + 1, found.returncode == 0 and bool(ledgers)
            accepted += is_equal
            what = f"{Path(words[1]).name} {' '.join((*words[2:], *variables.values()))}"
            print(f"{what}: {'equal' if is_equal else found.stdout + found.stderr}", flush=True)
    return {"runs": runs, "missed": runs - accepted}


PLACES_OF_BITS = ("weight", "gradient", "state", "batch", "generator")
# Saves after every EVERY steps. FLIPS has by step the place of a bit that is flipped, and its
# number: of the mantissa, so that no rounding hides it.
FLIPPED = """
import json, os, sys
import lightning as L, torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_d9m import DeterminismCallback

folder, steps, every = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

def flip(module, place, tensor):
    at, bit = json.loads(os.environ.get("FLIPS", "{}")).get(str(module.global_step), ("", 0))
    if at == place == "generator":
        torch.rand(1)
    elif at == place:
        tensor.detach().view(torch.int32).view(-1)[bit % tensor.numel()] ^= 1 << bit

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)
        )
    def training_step(self, batch, _):
        flip(self, "generator", None)
        flip(self, "batch", batch)
        return self.layers(batch).square().mean()
    def on_before_optimizer_step(self, optimizer):
        flip(self, "gradient", self.layers[0].weight.grad)
        if optimizer.state:
            flip(self, "state", optimizer.state[self.layers[0].weight]["exp_avg"])
    def on_before_zero_grad(self, _):
        flip(self, "weight", self.layers[0].weight)
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)

L.seed_everything(1)
saving = ModelCheckpoint(f"{folder}/saved", "{step}", save_top_k=-1, every_n_train_steps=every)
options = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
callbacks = [DeterminismCallback(ledger_dir=folder), saving]
trainer = L.Trainer(max_steps=steps, accelerator="cpu", callbacks=callbacks, **options)
trainer.fit(Net(), torch.utils.data.DataLoader(torch.randn(400, 8), 4, shuffle=True))
"""


def check_steps(steps: int, every: int, **variables: str) -> tuple[dict[str, Any], float]:
    """Train, and check all segments without the variables; return the result, and the seconds."""
    environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as root:
        script = Path(root, "train.py")
        script.write_text(FLIPPED)
        words = [shared_python(), str(script), f"{root}/run", str(steps), str(every)]
        start = time.monotonic()
        subprocess.run(words, env=environment | variables, check=True, capture_output=True)
        command = [sys.executable, "-m", "lightning_d9m", "check", f"{root}/run", "--json"]
        command += ["--segments", "all", "-o", f"{root}/check", "--", *words]
        done = subprocess.run(command, env=environment, check=False, stdout=subprocess.PIPE)
        return json.loads(done.stdout), time.monotonic() - start


def measure_flips(count: str) -> dict[str, Any]:
    """Count the flipped bits that are not found at their step."""
    every = 3  # as many steps after a checkpoint are recorded
    random, missed, flips = Random(1), 0, dict[int, tuple[str, int]]()  # noqa: S311 - no secret
    last = every * (int(count) + 1)
    for begin in range(every, last, every):  # not before the first checkpoint
        place = random.choice(PLACES_OF_BITS), random.randrange(12, 23)
        flips[begin + random.randrange(every)] = place
    found, seconds = check_steps(last, every, FLIPS=json.dumps(flips))
    # The first one has no flip, and ends a step after the next one begins.
    checked = found["checked"][1:]
    for (step, (place, _)), own in zip(flips.items(), checked, strict=True):
        right = own["verdict"] == "persistent" and own["equal_until"] == step
        missed += not right
        if not right:
            said = own["where"] or own["reason"][-500:]
            print(f"{place} in step {step}: {own['verdict']}, {said}")
    places = Counter(place for place, _ in flips.values())
    return {"flips": len(flips), "places": places, "missed": missed, "seconds": round(seconds)}


def measure_steps(count: str) -> dict[str, Any]:
    """Check a run without a difference, and count a false alarm."""
    found, seconds = check_steps(int(count), int(count) // 20)
    is_right = found["verdict"] == "equal" and found["steps"] == int(count)
    return {"steps": found["steps"], "missed": int(not is_right), "seconds": round(seconds)}


def time_command(command: list[str], folder: str, **variables: str) -> tuple[list[float], str]:
    """Return the seconds of a command, and those of all its processes on cores, and its output.

    On a machine that others use, the second number is the one that can be compared.
    """
    environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", **variables}
    used, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        command, cwd=folder, env=environment, check=False, stdout=subprocess.PIPE, text=True
    )
    seconds, now = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    on_cores = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return [round(seconds, 2), round(on_cores, 2)], done.stdout


def measure_cost(every: str, *options: str, command: Sequence[str] = ()) -> dict[str, Any]:
    """Measure a training that saves at each n-th step, and a check or another command of it."""
    with tempfile.TemporaryDirectory() as root:
        Path(root, "train.py").write_text(COSTLY)
        words = [sys.executable, "train.py", "run", every]
        command = command or ("check", "run", *options)
        again = [sys.executable, "-m", "lightning_d9m", *command, "-o", "again", "--", *words]
        (one, printed), (other, _) = (time_command(own, root) for own in (words, again))
    fit = float(printed.split("fit ")[1].split()[0])
    ratios = [round(b / a, 3) for a, b in zip(one, other, strict=True)]
    facts = {"training": one, "fit": fit, "interval": fit * int(every) / 2000, "threads": 1}
    return facts | {command[0]: other, "ratio": ratios}


# A training of 2,000 steps that differs from run to run, from the step or the validation that its
# first argument names; "rare" does so in step 1552 of 1 of 20 runs.
DIFFERING = """
import os, sys
import lightning as L, torch
from torch.utils.data import DataLoader

place = sys.argv[1]

def draw():
    return int.from_bytes(os.urandom(4), "little") / 2**32

if place == "rare":
    place = "1552" if draw() < 1 / 20 else ""

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6)))
    def training_step(self, batch, _):
        scale = 1 + 1e-3 * draw() if place == str(self.global_step) else 1
        return (self.layers(batch) * scale).square().mean()
    def validation_step(self, batch, _):
        self.log("loss", self.layers(batch).square().mean())
    def on_validation_epoch_end(self):
        if place == "validation" and self.current_epoch == 15:
            with torch.no_grad():
                self.layers[0].weight[0, 0] *= 1 + 1e-3 * draw()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

L.seed_everything(1)
data = torch.randn(51200, 512)
names = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
trainer = L.Trainer(max_epochs=20, accelerator="cpu", **dict.fromkeys(names, False))
trainer.fit(Net(), DataLoader(data, 512, shuffle=True), DataLoader(data[:512], 512))
"""
# The place of the difference, and the step after which a run has it.
PLACES = {"first": ("0", 1), "validation": ("validation", 1601)}
PLACES |= {"step": ("1552", 1553), "rare": ("rare", 1553)}


def measure_locate(name: str) -> dict[str, Any]:
    """Measure the seconds of a search, of one run to the step that differs, and of a start."""
    place, stop = PLACES[name]
    with tempfile.TemporaryDirectory() as root:
        Path(root, "train.py").write_text(DIFFERING)
        words = [sys.executable, "train.py", place]

        def train_part(request: str, own: str = place) -> list[float]:
            folder = f"{root}/{request.replace(':', '-')}-{own}"
            Path(folder, "kept").mkdir(parents=True)
            names = {"INTERRUPT": request, "CHECKPOINT_DIR": f"{folder}/kept", "LEDGER_DIR": folder}
            variables = {f"LIGHTNING_D9M_{name}": value for name, value in names.items()}
            return time_command([*words[:2], own], root, LIGHTNING_D9M="1", **variables)[0]

        begin, one = train_part("stop:1"), train_part(f"stop:{stop}")
        locate = [sys.executable, "-m", "lightning_d9m", "locate", "--json", "-o", "out"]
        if name == "rare":  # two runs that exist, of which one has differed
            for own in ("none", "1552"):
                train_part("keep", own)
                locate.append(f"keep-{own}/fit-000")
        search, printed = time_command([*locate, "--", *words], root)
        runs = len([*Path(root, "out").glob("run-*")])
    found = json.loads(printed)
    facts = {own: found[own] for own in ("cause", "step", "kind", "name") if own in found}
    facts |= {"runs": runs, "start": begin, "to the step": one, "search": search, "threads": 1}
    if stop > 1:
        facts["ratio without starts"] = [
            round((all_runs - runs * first) / (once - first), 2)
            for first, once, all_runs in zip(begin, one, search, strict=True)
        ]
    return facts


if __name__ == "__main__":
    part, *rest = sys.argv[1:] or ["kinds"]
    parts: dict[str, Callable[..., dict[str, Any]]] = {
        "cost": measure_cost,
        "flips": measure_flips,
        # The last step before a checkpoint is the farthest one.
        "goto": lambda n: measure_cost(n, command=("goto", str(30 * int(n) - 1), "run", "--trace")),
        "honest": measure_honest,
        "steps": measure_steps,
        "locate": measure_locate,
        "kinds": measure_kinds,
    }
    kept = parts[part](*rest)
    name = " ".join([part, *(word.rpartition("/")[2] for word in rest)])
    keep(RESULTS / "segments.json", {name: describe_machine() | kept})
    sys.exit(int(bool(kept.get("missed"))))
