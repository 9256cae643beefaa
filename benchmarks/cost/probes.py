"""Cost of probes for a training step.

Within one fit, blocks of steps with the callback alternate with blocks without it: the same model,
the same caches, the same minute. The ratio of two neighbouring blocks is formed from the means of
their steps, without the first; given are the median and the quartiles of these ratios. A step lasts
from the end of the one before to its own; on a CUDA device, which runs behind, a block lasts until
the device is done with it. What the callback does to a fit as a whole (seeds, flags, loaders, the
digests of an epoch) is in both kinds of blocks: benchmarks/cost/callback.py measures it.

Beside the ratio stands which share of the time passes inside the callback's own hooks. It varies
much less, because nothing is divided by another step; it lacks what Lightning takes to call them,
what a disturbed cache costs the rest of the step, and whatever is taken inside the model.

    python benchmarks/cost/probes.py [--device cuda] [--rounds 8] [--kinds Digits]
        [--variants "module probes"] [-o FILE]
"""

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import lightning.pytorch as pl
import torch
from probe_models import KINDS, Digits
from torch.utils.data import DataLoader

from lightning_d9m import DeterminismCallback

sys.path.insert(0, str(Path(__file__).parents[1]))
from measurement import QUIET, describe_machine, keep, quartiles

MODULES = ["input", "output", "grad_output"]
HOOKS = (
    "on_train_batch_start",
    "on_before_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)
VARIANTS = {
    "epoch digests": {},
    "step digests of weights and loss": {"probes": ["weight", "loss"]},
    "module probes": {"probes": MODULES},
    "op level": {"probes": ["op"]},
    "everything": {"probes": "all"},
}


class Switch(pl.Callback):
    """Times steps, and takes a callback out of the Trainer for every other block of them.

    Blocks come in the order on, off, off, on, so that what drifts meets both alike.
    """

    def __init__(self, own: DeterminismCallback, block: int) -> None:
        self.own = own
        self.block = block
        self.blocks: list[list[float]] = [[]]
        self.ended = 0.0
        self.inside = 0.0
        self.total_inside = self.total = 0.0
        for name in HOOKS:
            setattr(own, name, self.timed(getattr(own, name)))

    def timed(self, hook: Callable[..., None]) -> Callable[..., None]:
        """Return a hook that adds up how long it takes."""

        def call(*args: object, **words: object) -> None:
            began = time.perf_counter()
            hook(*args, **words)
            self.inside += time.perf_counter() - began

        return call

    def is_on(self) -> bool:
        """Return whether the block under way is one with the callback."""
        return len(self.blocks) % 4 in (0, 1)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        """Time a step; after the last of a block, switch."""
        steps = self.blocks[-1]
        if len(steps) in {0, self.block - 1} and trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
        steps.append(time.perf_counter() - self.ended)
        if self.is_on() and len(self.blocks) > 1 and len(steps) > 1:
            self.total_inside += self.inside
            self.total += steps[-1]
        if len(steps) == self.block:
            self.blocks.append([])
            # A new list, because Lightning is iterating over the other.
            trainer.callbacks = [self.own, self] if self.is_on() else [self]
            if not self.is_on():
                self.own._recorder.run.probes.unhook()  # noqa: SLF001 - what a batch that is not probed does
        self.inside = 0.0
        self.ended = time.perf_counter()

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: object) -> None:
        """Let the callback end the fit that it began."""
        trainer.callbacks = [self.own, self]

    def ratios(self) -> Iterator[tuple[float, float]]:
        """Yield (ratio, seconds without) for each two neighbours; the first two warm up."""
        whole = [own for own in self.blocks if len(own) == self.block]
        means = [statistics.fmean(own[1:]) for own in whole]
        for number in range(2, len(means) - 1, 2):  # off, on; on, off
            pair = means[number : number + 2]
            on, off = pair if number % 4 == 0 else pair[::-1]
            yield on / off, off


def train(kind: type[Digits], device: str, words: dict, folder: Path) -> Switch:
    """Train one epoch; return what was timed."""
    torch.manual_seed(0)
    own = DeterminismCallback(ledger_dir=folder, **words)
    switch = Switch(own, kind.block)
    trainer = pl.Trainer(
        **QUIET | {"accelerator": device},
        max_epochs=1,
        devices=1,
        callbacks=[own, switch],
        deterministic=True,
    )
    trainer.fit(kind(), DataLoader(kind.data(), batch_size=kind.batch_size))
    return switch


def measure(
    kind: type[Digits], device: str, variants: Sequence[str], rounds: int
) -> Iterator[tuple[str, dict]]:
    """Yield for each variant the ratio over steps without the callback."""
    for name in variants:
        words = VARIANTS[name]
        found: list[tuple[float, float]] = []
        inside = total = 0.0
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                switch = train(kind, device, words, Path(folder))
            found += switch.ratios()
            inside += switch.total_inside
            total += switch.total
        low, middle, high = quartiles([ratio for ratio, _ in found])
        yield (
            name,
            {
                "pairs": len(found),
                "step_without_s": statistics.median(off for _, off in found),
                "ratio": middle,
                "ratio_quartiles": [low, high],
                "share_inside_callback": inside / total,
            },
        )


def main() -> None:
    """Measure the models and print, or write, the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1, help="fits of each variant")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="all; on the CPU no ResNet50")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[*VARIANTS])
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    on_cpu = arguments.device == "cpu"
    for kind in arguments.kinds or [kind for kind in KINDS if not (on_cpu and kind == "ResNet50")]:
        rows = measure(KINDS[kind], arguments.device, arguments.variants, arguments.rounds)
        for name, row in rows:
            low, high = row["ratio_quartiles"]
            print(
                f"{kind:12} {name:34} {row['step_without_s'] * 1e3:8.2f} ms  x{row['ratio']:.3f}"
                f"  [{low:.3f}, {high:.3f}]  inside {row['share_inside_callback'] * 100:.2f} %",
                flush=True,
            )
            if arguments.output:  # after each: what was measured is kept
                keep(arguments.output, {"machine": describe_machine(), kind: {name: row}})


if __name__ == "__main__":
    main()
