"""A project that never mentions lightning_d9m; see lightning/autoload/test_entry_points.py."""

import importlib
import json
import sys
import warnings

import torch
from torch import nn

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "enable_progress_bar": False,
}
OWN = "lightning_d9m.DeterminismCallback"


def make_model(package):
    class Net(package.LightningModule):
        def __init__(self):
            super().__init__()
            self.lr = 0.1
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))

        def training_step(self, batch, batch_idx):
            return self.layers(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), self.lr)

        def train_dataloader(self):
            return torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=4, shuffle=True)

    return Net()


def fit(package, model=None, **words):
    """Train; return the sum of all weights, exactly, and the names of our callbacks."""
    model = model or make_model(package)
    trainer = package.Trainer(**({"max_epochs": 1} | QUIET | words))
    trainer.fit(model)
    return sum(float(p.double().sum()) for p in model.parameters()).hex(), added_to(trainer)


def added_to(trainer):
    """Return the names of the classes of our callbacks in a Trainer."""
    names = [type(c).__name__ for c in trainer.callbacks]
    return [name for name in names if name in ("AddedCallback", "DeterminismCallback")]


def find_learning_rate(package):
    """Let Lightning's finder run fits of its own."""
    tuner = package.tuner.Tuner(package.Trainer(max_epochs=1, **QUIET))
    return tuner.lr_find(make_model(package), num_training=16, early_stop_threshold=None).results


def demo_of(package):
    """Return Lightning's demonstration model, which a spawned process can import."""
    return importlib.import_module(f"{package.__name__}.demos.boring_classes").BoringModel


def run_command_line(package, *words):
    cli = importlib.import_module(f"{package.__name__}.cli")
    words = ["fit", "--trainer.max_epochs=1", "--trainer.limit_train_batches=1", *words]
    words += [f"--trainer.{name}={str(value).lower()}" for name, value in QUIET.items()]
    sys.argv = ["train.py"]
    return added_to(
        cli.LightningCLI(demo_of(package), args=words, save_config_callback=None).trainer
    )


def main():
    """Train in the ways that were asked for, and print what was found as JSON."""
    warnings.filterwarnings("ignore")
    package = importlib.import_module(sys.argv[1])
    package = package.pytorch if sys.argv[1] == "lightning" else package
    found = {"registered": "horovod_d9m" in package.strategies.StrategyRegistry}
    shared = [package.callbacks.Timer()]
    acts = {
        "first": lambda: fit(package),
        "second": lambda: fit(package),
        "list": lambda: fit(package, callbacks=shared),
        "list again": lambda: fit(package, callbacks=shared),
        "barebones": lambda: fit(package, barebones=True, logger=None),
        "fast_dev_run": lambda: fit(package, fast_dev_run=True),
        "learning rate": lambda: find_learning_rate(package),
        "command line": lambda: run_command_line(package),
        "own": lambda: run_command_line(package, f"--trainer.callbacks+={OWN}"),
        "ddp": lambda: fit(package, strategy="ddp", devices=2),
        "spawn": lambda: fit(package, demo_of(package)(), strategy="ddp_spawn", devices=1),
    }
    for name in sys.argv[2:]:
        found[name] = acts[name]()
    found["packages"] = [name for name in ("lightning", "pytorch_lightning") if name in sys.modules]
    callback = importlib.import_module("lightning_d9m").DeterminismCallback
    found["is_callback"] = issubclass(callback, package.Callback)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
