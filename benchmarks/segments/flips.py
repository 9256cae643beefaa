"""Bits that are flipped in each segment of a run, and long runs without a difference.

    python benchmarks/segments/flips.py flips 1000
    python benchmarks/segments/flips.py steps 100000

The programs are forks of a process that has imported torch and Lightning. What is measured is kept
in ``results/segments.json``.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

sys.path.extend(str(Path(__file__).parents[2] / own) for own in ("benchmarks", "tests/support"))

from forking_python import shared_python
from measurement import RESULTS, describe_machine, keep

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


if __name__ == "__main__":
    part, count = sys.argv[1:]
    kept = {"flips": measure_flips, "steps": measure_steps}[part](count)
    keep(RESULTS / "segments.json", {f"{part} {count}": describe_machine() | kept})
    sys.exit(int(bool(kept["missed"])))
