"""Host time of patched calls on their way to a CUDA device, with a stand-in for the device.

    PYTHONPATH=. python benchmarks/patch_host.py -o benchmarks/results/patch-host.json

Measured is the time until a call returns, before anything runs on a device, from the operator's
entry to the last launch. The tensors are small and on the CPU, so that torch's ops take about the
time of their dispatch; ``torch_us`` is that of torch's own kernel, for comparison.
Triton binds and looks up each launch as it does on CUDA, but a stand-in takes the place of the
compiled kernel, so nothing is computed. A launch of torch or of the driver takes a few microseconds
more on CUDA; their number is counted. The least of many short rounds is taken, so that other
programs disturb less. ``floor_us`` is the time of what any replacement of ``index_add_`` in Python
needs: an empty Python kernel, a check of the index, a fill, and a prepared launch, one by one.
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as nnf
import triton
from torch.library import Library
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from lightning_d9m.patches.exact_sums import Layout, plan_pieces
from lightning_d9m.patches.registration import Kernel, patches_applied
from lightning_d9m.patches.triton import kernels, launch

CALLS, ROUNDS = 2, 20_000
_FREE = {
    "_debug_has_internal_overlap",
    "broadcast_tensors",
    "empty",
    "as_strided",
    "set_",
    "detach",
    "alias",
    "is_pinned",
    "resize_",
}


class Counter(TorchDispatchMode):
    """Counts torch's ops that start a kernel."""

    names: list[str] = []  # noqa: RUF012 - one counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")  # noqa: SLF001 - its public name
        if not func.is_view and name.split(".")[0] not in _FREE:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


class StandIn(CompiledKernel):  # type: ignore[misc]
    """A compiled kernel that counts its launches."""

    launches = 0
    name = function = packed_metadata = src = None

    def __init__(self) -> None:
        self.module = self  # as if its binary were loaded

    def __del__(self) -> None:
        """Unload nothing."""

    @property
    def run(self) -> Callable[..., None]:
        """Return what launches the kernel."""
        return self.count

    @staticmethod
    def count(*_: object) -> None:
        """Count a launch."""
        StandIn.launches += 1


def stand_in() -> None:
    """Let Triton launch nothing, on the CPU."""
    kernel = StandIn()
    JITFunction._do_compile = lambda self, key, *_: self.device_caches[0][0].setdefault(key, kernel)  # noqa: SLF001
    device = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda _: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    triton.runtime.driver.set_active(device)
    launch._check = lambda *_: None  # noqa: SLF001 - nothing is computed


def list_calls() -> dict[str, Callable[[], object]]:
    """Return calls of small sizes."""
    target, rows = torch.randn(40, 8), torch.randn(64, 8)
    index = torch.randint(40, (64,))
    wide = index[:, None].expand(-1, 8)
    image, wider = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 16, 16)
    pooled, places = nnf.adaptive_max_pool2d(image, 3, return_indices=True)
    aten = torch.ops.aten
    # Overloads, as C++ calls them: Python would choose one at each call.
    resize = aten.upsample_bilinear2d_backward.default
    pool = aten.adaptive_max_pool2d_backward.default
    return {
        "index_add_": lambda: target.index_add_(0, index, rows),
        "scatter_add_": lambda: target.scatter_add_(0, wide, rows),
        "index_put_": lambda: target.index_put_((index,), rows, accumulate=True),
        "upsample_bilinear2d_backward": lambda: resize(wider, (16, 16), image.shape, False),
        "adaptive_max_pool2d_backward": lambda: pool(pooled, image, places),
    }


def measure_floor() -> dict[str, float]:
    """Return the time of each call that a replacement of ``index_add_`` needs."""
    target, rows, index = torch.randn(40, 8), torch.randn(64, 8), torch.randint(40, (64,))
    layout, pieces = Layout(1, 1, 1, 64, 8, 40, (0, 0, 1, 0)), plan_pieces(torch.float32, 65)
    size, launches = kernels._prepare(layout, pieces, (24, -126), True, False)  # noqa: SLF001
    memory, places = torch.full((size,), 0.0, dtype=torch.float64), torch.zeros(40)
    library = Library("aten", "IMPL")
    with warnings.catch_warnings(action="ignore"):
        library.impl("index_add_", lambda _, *args: args[0], "CPU", with_keyset=True)
    found = {"Python kernel": measure(lambda: target.index_add_(0, index, rows))}
    library._destroy()  # noqa: SLF001 - as in patches/registration.py
    found["check"] = measure(lambda: places.gather(0, index))
    found["fill"] = measure(lambda: torch.full((size,), 0.0, dtype=torch.float64))
    found["launch"] = measure(lambda: launches[0](target, rows, rows, index, memory))
    return {name: round(time, 1) for name, time in found.items()}


def measure(call: Callable[[], object]) -> float:
    """Return microseconds: the least mean of several rounds."""
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - begin) / CALLS)
    return min(times) * 1e6


def main() -> None:
    """Write host time and launches of each call."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    words = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    stand_in()
    for name, call in list_calls().items():
        launch._device_types.discard("cpu")  # noqa: SLF001 - kernels run on CUDA only
        own = measure(call)
        launch._device_types.add("cpu")  # noqa: SLF001 - as above
        with patches_applied("CPU"):
            call()
            ours = measure(call)
            StandIn.launches = 0
            Counter.names.clear()
            run = Kernel.__call__

            def counted(self: Any, *args: Any, run: Any = run, **kwargs: Any) -> Any:
                with Counter():
                    return run(self, *args, **kwargs)

            Kernel.__call__ = counted  # type: ignore[method-assign]
            call()
            Kernel.__call__ = run  # type: ignore[method-assign]
        rows.append(
            {
                "call": name,
                "torch_us": round(own, 1),
                "us": round(ours, 1),
                "ratio": round(ours / own, 1),
                "triton_launches": StandIn.launches,
                "torch_ops": Counter.names.copy(),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    if words.output:
        record = {"torch": torch.__version__, "triton": triton.__version__, "rows": rows}
        record["floor_us"] = measure_floor()
        words.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
