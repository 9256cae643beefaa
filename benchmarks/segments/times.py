"""The time of a check, of the arrival at a step, and of a search for a difference.

    python benchmarks/segments/times.py check 50 --segments 3
    python benchmarks/segments/times.py check 500 --segments all --jobs 2
    python benchmarks/segments/times.py proof 50 3
    python benchmarks/segments/times.py goto 50
    python benchmarks/segments/times.py locate first|step|validation|rare

The first numbers are the steps between checkpoints of 2,000. Starts of the program count, and are
shown. ``proof`` checks so many segments of a proof; its ``share`` is the time over that of these
segments with their starts, and what comes before them, which does not grow with the training, is
``verify``. What is measured is kept in ``results/segments.json``.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from measurement import RESULTS, describe_machine, keep

# A training of 2,000 steps of some 30 ms on one core. It differs from run to run, from the step or
# the validation that its first argument names; "rare" does so in step 1552 of 1 of 20 runs, and
# "none" never does. It saves after as many steps as the second argument says, if there is one.
PROGRAM = """
import os, sys, time
import lightning as L, torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

place, *every = sys.argv[1:]

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
options = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
options["enable_checkpointing"] = bool(every)
options["callbacks"] = [
    ModelCheckpoint("saved", save_top_k=-1, every_n_train_steps=int(own)) for own in every
]
trainer = L.Trainer(max_epochs=20, accelerator="cpu", **options)
start = time.monotonic()
trainer.fit(Net(), DataLoader(data, 512, shuffle=True), DataLoader(data[:512], 512))
print("fit", time.monotonic() - start)
"""


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


# The place of the difference, and the step after which a run has it.
PLACES = {"first": ("0", 1), "validation": ("validation", 1601)}
PLACES |= {"step": ("1552", 1553), "rare": ("rare", 1553)}


def measure_proof(every: int, segments: int) -> dict[str, Any]:
    """Measure a training that is proved, and a check of segments of its proof."""
    with tempfile.TemporaryDirectory() as root:
        Path(root, "train.py").write_text(PROGRAM)
        words = [sys.executable, "train.py", "none", str(every)]
        variables = {f"LIGHTNING_D9M{own}": "1" for own in ("", "_PROVABLE")}
        one, printed = time_command(words, root, LIGHTNING_D9M_LEDGER_DIR="run", **variables)
        d9m = [sys.executable, "-m", "lightning_d9m"]
        prove, _ = time_command([*d9m, "prove", "run"], root)
        check = [*d9m, "check", "proof.json", "--segments", str(segments), "-o", "again"]
        other, said = time_command([*check, "--json", "--", *words], root)
        verify, _ = time_command([*check, "--print-commands", "--", *words], root)
    found, fit = json.loads(said), float(printed.split("fit ")[1].split()[0])
    assert found["verdict"] == "equal", found
    start = one[0] - fit
    steps = sum(own["last"] - own["first"] for own in found["checked"])
    allowed = steps / found["last_step"] * fit + segments * start
    shares = {"share": other[0] / allowed, "share without verify": (other[0] - verify[0]) / allowed}
    facts = {"training": one, "fit": fit, "start": start, "prove": prove, "verify": verify}
    return facts | {"check": other, "allowed": allowed, **shares, "threads": 1}


def measure_command(command: list[str], every: int) -> dict[str, Any]:
    """Measure a training that saves at each n-th step, and a command that runs parts of it."""
    with tempfile.TemporaryDirectory() as root:
        Path(root, "train.py").write_text(PROGRAM)
        words = [sys.executable, "train.py", "none", str(every)]
        variables = {"LIGHTNING_D9M": "1", "LIGHTNING_D9M_LEDGER_DIR": "run"}
        one, printed = time_command(words, root, **variables)
        again = [sys.executable, "-m", "lightning_d9m", *command, "-o", "again", "--", *words]
        other, _ = time_command(again, root)
    fit = float(printed.split("fit ")[1].split()[0])
    ratios = [round(b / a, 3) for a, b in zip(one, other, strict=True)]
    facts = {"training": one, "fit": fit, "interval": fit * every / 2000, "threads": 1}
    return facts | {command[0]: other, "ratio": ratios}


def measure_locate(name: str) -> dict[str, Any]:
    """Measure the seconds of a search, of one run to the step that differs, and of a start."""
    place, stop = PLACES[name]
    with tempfile.TemporaryDirectory() as root:
        Path(root, "train.py").write_text(PROGRAM)
        # Runs that exist have their own checkpoints, one after each epoch.
        words = [sys.executable, "train.py", place, *["100"] * (name == "rare")]

        def train_part(request: str, own: str = place) -> list[float]:
            folder = f"{root}/{request.replace(':', '-') or 'run'}-{own}"
            Path(folder, "kept").mkdir(parents=True)
            names = {"INTERRUPT": request, "CHECKPOINT_DIR": f"{folder}/kept", "LEDGER_DIR": folder}
            variables = {f"LIGHTNING_D9M_{name}": value for name, value in names.items() if value}
            command = [*words[:2], own, *words[3:]]
            return time_command(command, root, LIGHTNING_D9M="1", **variables)[0]

        begin = train_part("stop:1")
        one = begin if stop == 1 else train_part(f"stop:{stop}")
        locate = [sys.executable, "-m", "lightning_d9m", "locate", "--json", "-o", "out"]
        if name == "rare":  # two runs that exist, of which one has differed
            for own in ("none", "1552"):
                train_part("", own)
                locate.append(f"run-{own}/fit-000")
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
    part, place, *options = sys.argv[1:]
    if part == "locate":
        kept = measure_locate(place)
    elif part == "proof":
        kept = measure_proof(int(place), int(options[0]))
    elif part == "goto":  # the last step before a checkpoint is the farthest one
        kept = measure_command(["goto", str(30 * int(place) - 1), "run", "--trace"], int(place))
    else:
        kept = measure_command(["check", "run", *options], int(place))
    name = " ".join(sys.argv[1:])
    keep(RESULTS / "segments.json", {name: describe_machine() | kept})
