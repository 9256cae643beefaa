"""CPU time and memory of a training step with portable bits over plain torch's, one thread.

Memory is what a process grows by while it makes a model and trains for three steps. An error is the
distance of all gradients of a step from those of float64, over the size of these.
"""

import argparse
import json
import os
import resource
import time
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path

import torch
from torch import nn

import lightning_d9m


def make_digits() -> nn.Module:
    """Return the network of examples/digits.py."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(1024, 128), nn.ReLU()),
        nn.Linear(128, 10),
    )


def make_mlp() -> nn.Module:
    """Return three linear layers."""
    return nn.Sequential(
        nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )


def make_transformer() -> nn.Module:
    """Return two encoder layers."""
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, activation="gelu")
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


MODELS = {
    "digits": (make_digits, (64, 1, 8, 8)),
    "mlp": (make_mlp, (128, 256)),
    "transformer": (make_transformer, (16, 32, 64)),
}


def measure(make: Callable[[], nn.Module], shape: tuple[int, ...], steps: int) -> list[float]:
    """Return the least CPU time of a plain and of a portable step, which take turns."""
    torch.manual_seed(0)
    model, inputs = make(), torch.randn(shape)
    optimizer = torch.optim.AdamW(model.parameters())
    least = [float("inf")] * 2
    for _ in range(steps):
        for place, context in enumerate((nullcontext, lightning_d9m.portable)):
            with context():
                start = time.process_time()
                loss = model(inputs).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                least[place] = min(least[place], time.process_time() - start)
    return least


def warm_up() -> None:
    """Load what torch and the mode load at their first step."""
    for context in (nullcontext, lightning_d9m.portable):
        with context():
            model = make_transformer()
            model(torch.randn(1, 4, 64)).square().mean().backward()
            torch.optim.AdamW(model.parameters()).step()


def measure_memory(make: Callable[[], nn.Module], shape: tuple[int, ...], portable: bool) -> int:
    """Return the MiB by which a fork grows that trains a model for three steps."""
    read, write = os.pipe()
    if os.fork() == 0:
        context = lightning_d9m.portable() if portable else nullcontext()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with context:
            model = make()
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.randn(shape)).square().mean().backward()
                optimizer.step()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        os.write(write, str(grown // 1024).encode())
        os._exit(0)
    os.wait()
    return int(os.read(read, 20))


def measure_errors(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> list[float]:
    """Return the errors of the gradients of a plain and of a portable step, without dropout."""
    torch.manual_seed(0)
    model, inputs = make(), torch.randn(shape)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0

    def differentiate(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        grads = torch.autograd.grad(model(inputs).square().mean(), list(model.parameters()))
        return torch.cat([grad.double().view(-1) for grad in grads])

    exact = differentiate(deepcopy(model).double(), inputs.double())
    errors = []
    for context in (nullcontext, lightning_d9m.portable):
        with context():
            found = differentiate(deepcopy(model), inputs)
        errors.append(float((found - exact).norm() / exact.norm()))
    return errors


def main() -> None:
    """Measure, print and write the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, object] = {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    warm_up()
    for name, (make, shape) in MODELS.items():
        large = (shape[0] * 8, *shape[1:])
        memory = [measure_memory(make, large, portable) for portable in (False, True)]
        errors = measure_errors(make, shape)
        plain, portable = measure(make, shape, arguments.steps)
        found[name] = {
            "plain_ms": round(plain * 1e3, 2),
            "portable_ms": round(portable * 1e3, 2),
            "ratio": round(portable / plain, 2),
            "plain_mib": memory[0],
            "portable_mib": memory[1],
            "memory_ratio": round(memory[1] / memory[0], 2),
            "plain_error": float(f"{errors[0]:.2e}"),
            "portable_error": float(f"{errors[1]:.2e}"),
        }
    text = json.dumps(found, indent=2)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
