"""Train on 1 to 8 processes with 8 logical ranks, and after a killed process on other numbers.

    python benchmarks/logical_ranks_proof.py            everything, about 15 minutes on two cores
    python benchmarks/logical_ranks_proof.py ddp        only this part: ddp, horovod or killed

``ddp`` and ``horovod`` run ``d9m repeat --processes 1,2,3,4,5,6,7,8``. ``killed`` kills the last of
4 processes of ``horovodrun`` in the second epoch, and continues from its last checkpoint with 3, 6
and 1 processes; each must end with the digests of a run that was not killed. Results go to
``benchmarks/results/logical-ranks-proof.json``.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_d9m import (
    DDPDeterministicStrategy,
    DeterminismCallback,
    HorovodDeterministicStrategy,
    read_ledger,
)
from lightning_d9m.ledger.format.records import Digests

RESULT = Path(__file__).parent / "results" / "logical-ranks-proof.json"
PROCESSES = "1,2,3,4,5,6,7,8"
LOGICAL_RANKS = 8
CONTINUED = (3, 6, 1)


class Net(L.LightningModule):
    """A convolution with batch normalization and dropout, clipped, with a schedule."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(288, 10),
        )

    def compute_loss(self, batch):
        """Return the cross-entropy of images (N, 64) and classes (N,)."""
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def training_step(self, batch, _):
        """Train on a micro-batch."""
        loss = self.compute_loss(batch)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, _):
        """Log the loss."""
        self.log("val_loss", self.compute_loss(batch), sync_dist=True)

    def configure_optimizers(self):
        """Use AdamW with OneCycleLR."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Killing(L.Callback):
    """Kills the last process in the second epoch."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):  # noqa: ARG002 - the hook's
        """Kill it."""
        if trainer.current_epoch == 1 and batch_idx == 2 and module.global_rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def train(strategy, checkpoints, *, is_killed):
    """Train 3 epochs, from the last checkpoint if there is one."""
    digits = load_digits()
    data = TensorDataset(
        torch.tensor(digits.data[:400], dtype=torch.float32) / 16,
        torch.tensor(digits.target[:400]),
    )
    kinds = {"ddp": DDPDeterministicStrategy, "horovod": HorovodDeterministicStrategy}
    callbacks = [DeterminismCallback(seed=5, threads=1)]
    if checkpoints:
        callbacks.append(ModelCheckpoint(checkpoints, save_last=True, every_n_train_steps=1))
    if is_killed:
        callbacks.append(Killing())
    devices = {"devices": int(os.environ.get("LOCAL_WORLD_SIZE", "1"))} if strategy == "ddp" else {}
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=kinds[strategy](logical_ranks=LOGICAL_RANKS),
        max_epochs=3,
        callbacks=callbacks,
        gradient_clip_val=0.5,
        logger=False,
        enable_checkpointing=bool(checkpoints),
        enable_progress_bar=False,
        enable_model_summary=False,
        **devices,
    )
    loaders = [DataLoader(data, 8, shuffle=True), DataLoader(data, 8)]
    trainer.fit(Net(), *loaders, ckpt_path="last" if checkpoints else None)


def run_repeat(strategy, folder):
    """Run ``d9m repeat``; return its verdict and runs."""
    command = [sys.executable, __file__, "--train", strategy]
    if strategy == "horovod":
        command = ["horovodrun", "-np", "{processes}", *command]
    options = ["--processes", PROCESSES, "--json", "-o", folder / strategy]
    done = subprocess.run(
        ["d9m", "repeat", *options, "--", *command],
        stdout=subprocess.PIPE,
        check=False,
        text=True,
    )
    found = json.loads(done.stdout)
    keys = ("processes", "verdict", "seconds")
    runs = [{key: run[key] for key in keys} for run in found["runs"]]
    return {"command": f"d9m repeat --processes {PROCESSES}", "status": done.returncode} | {
        "verdict": found["verdict"],
        "runs": runs,
    }


def start_horovod(processes, ledger, *arguments):
    """Run the training under ``horovodrun``; return its status and output."""
    command = ["horovodrun", "-np", str(processes), sys.executable, __file__]
    done = subprocess.run(
        [*command, "--train", "horovod", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        text=True,
        env=os.environ | {"LIGHTNING_D9M_LEDGER_DIR": str(ledger)},
    )
    return done.returncode, done.stdout


def read_final(folder):
    """Return the last digests of rank 0 in the only ledger of a folder."""
    (path,) = folder.iterdir()
    with read_ledger(path).open(0) as reader:
        return [record for record in reader.records() if isinstance(record, Digests)][-1]


def run_killed(folder):
    """Kill a process, and continue with other numbers of processes."""
    status, output = start_horovod(2, folder / "straight")
    assert status == 0, output
    expected = read_final(folder / "straight")
    kept = folder / "kept"
    status, output = start_horovod(4, folder / "killed", "--checkpoints", kept, "--killed")
    assert status != 0, output
    named = [line for line in output.splitlines() if "was killed or exited" in line]
    runs = []
    for processes in CONTINUED:
        copy = folder / f"kept-{processes}"
        subprocess.run(["cp", "-r", kept, copy], check=True)
        status, output = start_horovod(processes, folder / str(processes), "--checkpoints", copy)
        assert status == 0, output
        final = read_final(folder / str(processes))
        runs.append({"processes": processes, "equal": final == expected})
    return {"processes": 4, "error_of_the_others": named[:1], "continued": runs}


def main():
    """Run all parts, or one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", help="ddp, horovod, killed")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--checkpoints", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--killed", action="store_true", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.train:
        train(words.train, words.checkpoints, is_killed=words.killed)
        return
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {"torch": torch.__version__}
    for part in words.parts or ["ddp", "horovod", "killed"]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            result[part] = run_killed(folder) if part == "killed" else run_repeat(part, folder)
        print(part, json.dumps(result[part], indent=1), flush=True)
        RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
