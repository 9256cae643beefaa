"""A simulated CUDA device: tensors that say they are on it, streams, and a count of waits."""

import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_d9m
from lightning_d9m.engine.hashing import digest, xxh3

PACKAGE = str(Path(lightning_d9m.__file__).parent)
# Results whose values or sizes the host must know.
WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
CUDA = torch.device("cuda", 0)


class LikeCuda(torch.Tensor):
    """A CPU tensor that says that it is on a CUDA device."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cpu = property(lambda _: False)
    device = property(lambda _: CUDA)
    streams = ()

    def record_stream(self, stream):
        self.streams = (*self.streams, stream)
        stream.kept.append(self)  # the allocator does not reuse the memory now


def put(tensor):
    return tensor.clone().as_subclass(LikeCuda)


class Stream:
    """A stream; its work waits until the host waits for this stream."""

    def __init__(self):
        self.work = []
        self.kept = []

    def run(self):
        while self.work:
            self.work.pop(0)()

    def record_event(self):
        return SimpleNamespace(synchronize=self.run)


class Device:
    """The simulated device, and the functions of ``xxh3_cuda`` for it."""

    def __init__(self):
        self.current = Stream()
        self.launches = []

    def start_hashing(self, memory, _):
        self.launches.append((self.current, len(memory)))
        leaves = torch.full((sum(xxh3.count_chunks(size) for _, size in memory),), -1)

        def hash_all():
            data = bytearray(b"".join(xxh3.hash_chunks(memory)))
            if data:
                leaves.copy_(torch.frombuffer(data, dtype=torch.int64))

        self.current.work.append(hash_all)
        return leaves

    def start_copy(self, launched):
        here = torch.zeros(sum(map(len, launched)), dtype=torch.int64)
        self.current.work.append(lambda: here.copy_(torch.cat(launched)))
        return here

    @contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


device = Device()


def simulate(monkeypatch):
    """Let digests be computed on the simulated device."""
    device.__init__()
    monkeypatch.setattr(digest, "load_kernel", lambda _: device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: device.current)
    monkeypatch.setattr(torch.cuda, "stream", device.on)
    return device


class Waits(TorchDispatchMode):
    """Counts the calls of the package that wait for a device, by call and place.

    Those are ops that return a value or a size to the host (``item``, ``bool``, ``nonzero``),
    copies to the host, and waits for a stream, an event or a device. A call is the package's if the
    innermost frame outside torch is.

    Attributes:
        found: The number of calls by name and place.
    """

    def __init__(self):
        super().__init__()
        self.found = Counter()
        self._patch = pytest.MonkeyPatch()

    def __enter__(self):
        for owner, name in (
            *((torch.Tensor, name) for name in ("__bool__", "cpu", "tolist", "to")),
            *((torch.cuda, "synchronize"), (torch.accelerator, "synchronize")),
            *((torch.cuda.Event, "synchronize"), (torch.cuda.Stream, "synchronize")),
            (Stream, "run"),
        ):
            self._patch.setattr(owner, name, self._counted(name, getattr(owner, name)))
        return super().__enter__()

    def __exit__(self, *error):
        self._patch.undo()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if WAITING & {*func.tags}:
            self._note(str(func))
        return func(*args, **(kwargs or {}))

    def _counted(self, name, call):
        def counted(*args, **kwargs):
            targets = {str(each) for each in (*args[1:], *kwargs.values())}
            if name != "to" or ("cpu" in targets and args[0].device.type != "cpu"):
                self._note(name)
            return call(*args, **kwargs)

        return counted

    def _note(self, name):
        frame = sys._getframe(1)
        while frame is not None and (
            frame.f_code.co_filename.startswith((__file__, *torch.__path__))
            or "contextlib" in frame.f_code.co_filename
        ):
            frame = frame.f_back
        if frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
            place = frame.f_code.co_filename.removeprefix(PACKAGE)
            self.found[f"{name} in {frame.f_code.co_name} of {place}"] += 1
