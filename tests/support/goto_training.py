"""A training whose steps can be returned to: goto_training.py FOLDER [WHAT].

It writes the SHA-256 of what each step of each rank sees to FOLDER/seen-RANK, if the folder has no
such file. WHAT: "label" changes a sample; "nan" makes the loss of step 9 infinite; "crash" raises
there, and "noise" adds entropy on the second rank; "twice" makes two steps in a batch; "loop" and
"hosted" train with a Recorder and with the Trainer of transformers.
"""

import hashlib
import os
import sys
import warnings
from functools import partial
from pathlib import Path

import lightning as L
import torch
import trainings
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lightning_d9m import (
    HorovodDeterministicStrategy,
    Recorder,
    TransformersCallback,
    deterministic,
)

FOLDER, WHAT = Path(sys.argv[1]), sys.argv[2:]
WORLD = int(os.environ.get("RANKS", "1"))
STRATEGY = os.environ.get("STRATEGY", "ddp")
STRATEGIES = {
    "": lambda: "auto",
    "ddp": lambda: "ddp",
    # By default Lightning shards over nodes, which is no sharding on one.
    "fsdp2": partial(ModelParallelStrategy, WORLD, 1),
    "horovod": HorovodDeterministicStrategy,
}
SEEN = []


def fingerprint(model, batch):
    """Return the SHA-256 of the weights, the batch and the generator."""
    tensors = [*model.parameters(), *batch, torch.get_rng_state()]
    local = [getattr(tensor, "_local_tensor", tensor).detach() for tensor in tensors]
    return hashlib.sha256(b"".join(own.numpy().tobytes() for own in local)).hexdigest()


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Dropout(0.2))
        self.automatic_optimization = "twice" not in WHAT

    def configure_model(self):
        if STRATEGY == "fsdp2":
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, index):
        SEEN.append(fingerprint(self, batch))
        images = batch[0]
        if self.global_step == 9 and "noise" in WHAT and self.global_rank == 1:
            images = images + int.from_bytes(os.urandom(4), "big") / 2**32
        loss = cross_entropy(self.layers(images), batch[1])
        if self.global_step == 9 and "crash" in WHAT:
            raise ValueError("a bad sample")
        for factor in () if self.automatic_optimization else (1, 2):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(factor * loss, retain_graph=True)
            optimizer.step()
        return loss / 0 if self.global_step == 9 and "nan" in WHAT else loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def make_data():
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(8 * 8 * WORLD, 8, generator=generator)
    classes = images[:, :4].argmax(1)
    classes[:] = (classes + ("label" in WHAT)) % 4
    return TensorDataset(images, classes)


def fit():
    saves = ModelCheckpoint(
        FOLDER / "saved",
        save_top_k=-1,
        every_n_train_steps=3,
        filename="{step}",
        save_on_train_epoch_end=False,
    )
    strategy = STRATEGIES[STRATEGY if WORLD > 1 else ""]()
    words = {"max_epochs": 2, "devices": WORLD, "strategy": strategy}
    loader = DataLoader(make_data(), 8, shuffle=True)
    words |= {"callbacks": [saves], "enable_checkpointing": True}
    return trainings.fit(Net(), loader, seed=1, folder=FOLDER, **words).global_rank


def loop():
    with deterministic(seed=1):
        model = torch.nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with Recorder(FOLDER, model, optimizer) as run:
            for epoch in range(run.next_epoch, 2):
                for batch in run.batches(DataLoader(make_data(), 8, shuffle=True)):
                    SEEN.append(fingerprint(model, batch))
                    optimizer.zero_grad()
                    loss = cross_entropy(model(batch[0]), batch[1])
                    loss.backward()
                    optimizer.step()
                    run.step(loss)
                run.epoch(epoch)
    return 0


def host():
    from transformers import Trainer, TrainingArguments

    class Hosted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 4)

        def forward(self, images, labels):
            return {"loss": cross_entropy(self.layer(images), labels)}

    class OwnTrainer(Trainer):
        def training_step(self, model, inputs, *rest):
            SEEN.append(fingerprint(model, inputs.values()))
            return super().training_step(model, inputs, *rest)

    data = [{"images": image, "labels": label} for image, label in make_data()]
    arguments = TrainingArguments(
        str(FOLDER / "saved"),
        per_device_train_batch_size=8,
        num_train_epochs=2,
        save_steps=3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    with deterministic(seed=1):
        OwnTrainer(
            Hosted(), arguments, train_dataset=data, callbacks=[TransformersCallback(FOLDER)]
        ).train()
    return 0


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    rank = loop() if "loop" in WHAT else host() if "hosted" in WHAT else fit()
    seen = FOLDER / f"seen-{rank}"
    if not seen.exists():
        seen.write_text("\n".join(SEEN))
