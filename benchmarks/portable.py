"""Time and memory of a training step, and of a product, with portable bits over plain torch's.

Plain and portable steps take turns; the ratio is that of the medians. Memory is what a process
grows by while it makes a model and trains for three steps.
"""

import argparse
import itertools
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median

import torch
from measurement import alternate, time_call
from torch import nn

import lightning_d9m

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from digits import DigitsNet


def make_mlp() -> nn.Module:
    """Return three linear layers."""
    return nn.Sequential(
        nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )


def make_transformer() -> nn.Module:
    """Return two encoder layers."""
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, activation="gelu")
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Block(nn.Module):
    """A block of ResNet-18."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            *(nn.BatchNorm2d(outputs), nn.ReLU()),
            *(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        shorter = (nn.Conv2d(inputs, outputs, 1, 2, bias=False), nn.BatchNorm2d(outputs))
        self.beside = nn.Sequential(*shorter[: 2 * (stride - 1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what is beside the block."""
        return (self.body(x) + self.beside(x)).relu()


def make_resnet() -> nn.Module:
    """Return ResNet-18."""
    widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()),
        nn.MaxPool2d(3, 2, 1),
        *(Block(*pair) for pair in itertools.pairwise(widths)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)),
    )


MODELS = {
    "digits": (lambda: DigitsNet().layers, (64, 1, 8, 8)),
    "mlp": (make_mlp, (128, 256)),
    "transformer": (make_transformer, (16, 32, 64)),
    "resnet": (make_resnet, (16, 3, 64, 64)),
}


def measure(step: Callable[[], object], repeats: int) -> list[float]:
    """Return the median times of a plain and of a portable step, which take turns."""

    def take(context: Callable[[], AbstractContextManager[object]]) -> float:
        with context():
            return time_call(step)

    ways = {"plain": partial(take, nullcontext), "portable": partial(take, lightning_d9m.portable)}
    return [median(times) for times in alternate(ways, repeats).values()]


def make_step(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> Callable[[], None]:
    """Return a training step of a model."""
    torch.manual_seed(0)
    model, inputs = make(), torch.randn(shape)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return step


def measure_memory(make: Callable[[], nn.Module], shape: tuple[int, ...], portable: bool) -> int:
    """Return the MiB by which a fork grows that trains a model for three steps."""
    read, write = os.pipe()
    if os.fork() == 0:
        context = lightning_d9m.portable() if portable else nullcontext()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with context:
            step = make_step(make, shape)
            for _ in range(3):
                step()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        os.write(write, str(grown // 1024).encode())
        os._exit(0)
    os.wait()
    return int(os.read(read, 20))


def main() -> None:
    """Measure, print and write the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    matrix = torch.randn(1024, 1024)
    steps = {"product": lambda: matrix @ matrix}
    steps |= {name: make_step(*given) for name, given in MODELS.items()}
    found: dict[str, object] = {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    found["threads"] = arguments.threads
    for name, step in steps.items():
        plain, portable = measure(step, arguments.steps)
        found[name] = {"plain_ms": round(plain * 1e3, 2), "ratio": round(portable / plain, 2)}
    # A fork of a process with several threads of OpenMP would wait for them.
    for name, (make, shape) in MODELS.items() if arguments.threads == 1 else ():
        large = (shape[0] * 4, *shape[1:])
        plain, portable = (measure_memory(make, large, one) for one in (False, True))
        found[name] |= {"plain_mib": plain, "memory_ratio": round(portable / plain, 2)}
    text = json.dumps(found, indent=2)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
