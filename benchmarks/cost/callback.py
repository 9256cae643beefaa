"""Cost of the callback: a whole ``fit`` with it over a bare ``Trainer(deterministic=True)``.

    python benchmarks/cost/callback.py

Two models: the digits network of the examples, and a perceptron of 10 million parameters. Fits
alternate within one process. Two figures: the median of the ratios of neighbouring fits, with their
quartiles, which holds everything and all the noise of the machine; and the share of a fit that is
spent in the package (in the callback's hooks, around batches and around loops), which holds little
noise. What a timer takes itself is found in fits with a callback that does nothing, and is taken
off: a call that a training makes rarely finds nothing in the caches, a timer no more than a hook.
Results go to ``benchmarks/results/callback-cpu.json``.
"""

import argparse
import logging
import statistics
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_d9m import DeterminismCallback
from lightning_d9m.engine.control.data.loaders import LoaderControl
from lightning_d9m.engine.control.seeding import RandomStreams, SeededHost
from lightning_d9m.integrations.lightning.resume.resumable_fit import ResumableFit
from lightning_d9m.integrations.lightning.trainer_session import TrainerSession

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[1]))
from digits import Digits, DigitsNet
from measurement import (
    QUIET,
    RESULTS,
    alternate,
    describe_machine,
    keep,
    quartiles,
    ratios,
    time_call,
)


class TenMillion(L.LightningModule):
    """A multilayer perceptron of 10.5 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(),
            nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10),
        )  # fmt: skip

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        """Return the cross-entropy of a batch."""
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Use Adam, whose state triples what is digested."""
        return torch.optim.Adam(self.parameters())

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """One hundred batches of 64."""
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(6400, 1024, generator=generator)
        classes = torch.randint(10, (6400,), generator=generator)
        return DataLoader(TensorDataset(inputs, classes), 64, shuffle=True)


# Beside the hooks, what a training calls in the package around loops and batches.
ENTRANCES = {
    DeterminismCallback: ("setup", "teardown"),
    TrainerSession: ("start_evaluation", "end_evaluation"),
    ResumableFit: ("_begin_validation", "capture"),
    LoaderControl: ("wrap_loader", "start_epoch"),
    SeededHost: ("__enter__", "__exit__"),
    RandomStreams: ("derive",),
}


# A callback that does nothing.
HOOKS = "train_batch_start", "before_backward", "before_optimizer_step", "train_batch_end"
Idle = type("Idle", (L.Callback,), {f"on_{name}": lambda *_: None for name in HOOKS})


class Spent:
    """The seconds that are spent in the package, wherever the training enters it, and how often."""

    seconds = 0.0
    entered = 0
    inside = False


def _time(owner, name):
    original = vars(owner)[name]

    def timed(*arguments, **words):
        if Spent.inside:  # its seconds are counted already
            return original(*arguments, **words)
        Spent.inside = True
        start = time.perf_counter()
        try:
            return original(*arguments, **words)
        finally:
            Spent.seconds += time.perf_counter() - start
            Spent.entered += 1
            Spent.inside = False

    setattr(owner, name, timed)


def time_entrances():
    """Time the hooks, and what is called around loops and batches."""
    for name in [n for n in vars(DeterminismCallback) if n.startswith("on_")]:
        _time(DeterminismCallback, name)
    for name in [n for n in vars(Idle) if n.startswith("on_")]:
        _time(Idle, name)
    for owner, names in ENTRANCES.items():
        for name in names:
            _time(owner, name)


def measure(make_model, make_data, epochs, repeats):
    """Return the ratios with the callback over without, and the seconds of both."""

    def fit(make_callbacks):
        L.seed_everything(42, verbose=False)
        Spent.seconds, Spent.entered = 0.0, 0
        model, data, callbacks = make_model(), make_data(), make_callbacks()
        with tempfile.TemporaryDirectory() as folder:
            words = QUIET | {"callbacks": callbacks, "default_root_dir": folder}
            # The start of a Trainer is not a part of the fit.
            trainer = L.Trainer(max_epochs=epochs, deterministic=True, **words)
            took = time_call(lambda: trainer.fit(model, data))
        return took, Spent.seconds, Spent.entered

    makers = {"bare": list, "idle": lambda: [Idle()], "callback": lambda: [DeterminismCallback()]}
    found = alternate({name: partial(fit, make) for name, make in makers.items()}, repeats)
    timers = [spent / entered for _, spent, entered in found["idle"]]
    shares = [
        (spent - entered * timer) / took
        for (took, spent, entered), timer in zip(found["callback"], timers, strict=True)
    ]
    bare, callback = ([took for took, *_ in found[name]] for name in ("bare", "callback"))
    low, middle, high = ratios(callback, bare)
    return {
        "epochs": epochs,
        "repeats": repeats,
        "share_in_package_median": statistics.median(shares),
        "share_in_package_quartiles": quartiles(shares)[::2],
        "seconds_per_timer_median": statistics.median(timers),
        "ratio_median": middle,
        "ratio_quartiles": [low, high],
        "seconds_bare_median": statistics.median(bare),
        "seconds_callback_median": statistics.median(callback),
        "ratio_of_minima": min(callback) / min(bare),
    }


def main() -> None:
    """Measure both models, and print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", type=Path, default=RESULTS / "callback-cpu.json")
    parser.add_argument("--only", choices=["digits", "10M parameters"], help="keep the other's row")
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    torch.use_deterministic_algorithms(True)
    time_entrances()
    cases = {"digits": (DigitsNet, Digits, 10), "10M parameters": (TenMillion, lambda: None, 2)}
    for name, case in cases.items():
        if arguments.only in (None, name):
            results = {name: measure(*case, arguments.repeats)}
            keep(arguments.output, {"machine": describe_machine(), "results": results})


if __name__ == "__main__":
    main()
