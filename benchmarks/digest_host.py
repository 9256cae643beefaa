"""Measure the host's time for digests on a CUDA device: ``python benchmarks/digest_host.py``.

No device is needed: tensors of the CPU say that they are on one, and a launch does nothing. So the
times are those of our Python code and of torch's on the host; of a launch, only what precedes
Triton's launcher is in them. Every method runs twice in each round: after the
others, which empty the caches of the processor as a training step does, and at once again. Medians
of the thread's CPU time.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from unittest import mock

import torch

from lightning_d9m.hashing import digest, xxh3_cuda
from lightning_d9m.probes.trace import Trace, name_leaves

RESULTS = Path(__file__).parent / "results"
CUDA = torch.device("cuda", 0)


class LikeCuda(torch.Tensor):
    """A CPU tensor that says that it is on a CUDA device."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # noqa: SLF001 - documented in "Extending PyTorch"
    is_cpu = property(lambda _: False)
    device = property(lambda _: CUDA)

    def record_stream(self, _: object) -> None:
        """Do nothing."""


class NoStream:
    """A stream on which nothing runs."""

    def record_event(self) -> "NoStream":
        """Return an event that has happened."""
        return self

    def synchronize(self) -> None:
        """Do nothing."""

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, *_: object) -> None:
        """Do nothing."""


STREAM = NoStream()


class Launcher:
    """A Triton kernel that does nothing."""

    launches = 0

    def __getitem__(self, _: object) -> Callable[..., None]:
        """Return the function that launches."""

        def launch(*_: object, **__: object) -> None:
            self.launches += 1

        return launch


def always(value: object) -> Callable[..., object]:
    """Return a function that returns a value, faster than a mock does."""
    return lambda *_: value


def measure(methods: dict[str, Callable[[], None]], rounds: int) -> dict[str, dict[str, float]]:
    """Return the median milliseconds of each method, after other work and at once again."""
    taken: dict[str, dict[str, list[float]]] = {
        name: {"after other work": [], "at once again": []} for name in methods
    }
    for turn in range(rounds + 1):
        for name, method in methods.items():
            for times in taken[name].values():
                begin = time.thread_time_ns()  # other programs do not count
                method()
                if turn:  # the first one warms up
                    times.append((time.thread_time_ns() - begin) / 1e6)
    return {
        name: {when: round(statistics.median(times), 3) for when, times in found.items()}
        for name, found in taken.items()
    }


def list_methods(count: int) -> dict[str, Callable[[], None]]:
    """Return the ways to take the digests of ``count`` tensors, up to the last launch."""
    tensors = [torch.rand(100, 10).as_subclass(LikeCuda) for _ in range(count)]
    named = {str(number): tensor for number, tensor in enumerate(tensors)}
    groups = [tensors[begin : begin + 4] for begin in range(0, count, 4)]

    def take_state() -> None:
        Trace().add_leaves("weight", [*named.items()])

    def take_each() -> None:
        trace = Trace()
        for tensor in tensors:
            trace.add_leaves("output", name_leaves("module", tensor))

    def take_groups() -> None:
        trace = Trace()
        for group in groups:
            trace.add_leaves("input", name_leaves("module", group))

    return {
        "weights: one launch": take_state,
        "values: one launch each": take_each,
        "values: one launch for four": take_groups,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the result")
    words = parser.parse_args()
    torch.set_num_threads(1)
    launcher, empty = Launcher(), torch.empty
    with (
        mock.patch.object(digest, "load_kernel", always(xxh3_cuda)),
        mock.patch.object(torch.cuda, "current_stream", always(STREAM)),
        mock.patch.object(torch.cuda, "device", always(STREAM)),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", always(False)),
        mock.patch.object(xxh3_cuda, "_load_constants", always(None)),
        mock.patch.object(xxh3_cuda, "hash_chunks", launcher),
        mock.patch.object(torch, "empty", lambda size, **_: empty(size, dtype=torch.int64)),
        mock.patch.object(torch.Tensor, "to", lambda tensor, *_, **__: tensor),
    ):
        found = measure(list_methods(words.tensors), words.rounds)
    assert launcher.launches, "nothing was launched"
    record = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "tensors": words.tensors,
        "rounds": words.rounds,
        "milliseconds": found,
    }
    words.output.mkdir(parents=True, exist_ok=True)
    path = words.output / "digest-host.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(path.read_text())


if __name__ == "__main__":
    main()
