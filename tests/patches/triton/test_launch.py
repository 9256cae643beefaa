"""Use of Triton kernels: when torch ops take over."""

import re
import warnings
from collections.abc import Callable, Iterator
from subprocess import CalledProcessError

import pytest
import torch
from simulated_device import put
from torch import Tensor

from lightning_d9m.engine.hashing.digest import load_kernel
from lightning_d9m.errors import D9mError
from lightning_d9m.ops.patches.kernels import separable
from lightning_d9m.ops.patches.triton import launch


@pytest.fixture(autouse=True)
def withdrawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Let kernels run on the CPU, and forget which ones were withdrawn."""
    names: set[str] = set()
    monkeypatch.setattr(launch, "_withdrawn", names)
    monkeypatch.setattr(launch._thread, "by_torch", False, raising=False)
    monkeypatch.setattr(launch, "_checked", set())
    monkeypatch.setattr(launch, "_device_types", {"cpu"})
    return names


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], list[int]]:
    """Return a function that lets every path name a kernel, or one that fails with an error.

    It returns the list of the kernel's last arguments.
    """

    def install_kernel(kernel: object) -> list[int]:
        seen: list[int] = []

        def run(out: Tensor, by: int) -> None:
            if launch._thread.by_torch:  # the text, run by torch ops
                out.add_(by)
                return
            seen.append(by)
            if isinstance(kernel, BaseException):
                raise kernel
            out.copy_(kernel(out, by))

        monkeypatch.setattr(launch, "_load", lambda path: run)
        return seen

    return install_kernel


def make_example(device: torch.device) -> tuple[Tensor, int]:
    """Return the arguments with which a kernel is checked."""
    return torch.zeros(2, device=device), 5


def run(kind: str = "cpu") -> float:
    """Add 3 to 1, by a kernel or by torch ops, and return the sum."""
    out = torch.ones(1) if kind == "cpu" else put(torch.ones(1))
    launch.run_kernel("sums:add", make_example, out, 3)
    return out.item()


def test_a_kernel_that_gives_the_bits_of_an_example_is_used(install, withdrawn, monkeypatch):
    """The example is computed once for each device; the tensors of the program only once."""
    seen = install(torch.add)
    assert [run(), run()] == [4, 4]
    assert seen == [5, 3, 3]
    assert not withdrawn
    monkeypatch.setattr(launch, "_device_types", {"cuda"})  # the CPU computes with torch ops
    assert run() == 4
    assert seen == [5, 3, 3]


class TritonError(Exception):
    """Stands for Triton's own error, whose base class is Exception."""


FAILURES = {
    "op": (torch.mul, "RuntimeError: on cpu its bits"),
    "bits": (lambda out, by: out + by + 1e-6, "RuntimeError: on cpu its bits"),
    "compiler": (RuntimeError("Failed to find C compiler."), None),
    "module": (ModuleNotFoundError("No module named 'triton'"), None),
    "command": (CalledProcessError(1, ["gcc"]), None),
    "memory": (TritonError("out of resource: shared memory"), "TritonError: out of resource"),
    "launch": (RuntimeError("Triton Error [CUDA]: invalid argument"), "RuntimeError: Triton Error"),
}


@pytest.mark.parametrize(("kernel", "said"), FAILURES.values(), ids=FAILURES)
def test_torch_ops_replace_a_kernel_that_fails(install, withdrawn, kernel, said) -> None:
    """One warning, then nothing more is tried; it advises to install what is missing.

    The tensors of the program are not given to a kernel with other bits.
    """
    seen = install(kernel)
    reason = re.escape(f"sums:add cannot be used ({said or type(kernel).__name__}")
    with pytest.warns(UserWarning, match=f"{reason}.*Torch ops") as caught:
        assert run() == 4
    assert ("gcc and Python's headers" in str(caught[0].message)) == (said is None)
    with warnings.catch_warnings(action="error"):
        assert run() == 4
    assert seen == [5]
    assert withdrawn == {"sums:add"}


def test_a_first_use_while_a_graph_is_captured_is_refused(install, withdrawn, monkeypatch) -> None:
    """The kernel is not withdrawn: it works after the step has run once."""
    install(RuntimeError("operation not permitted when stream is capturing"))
    monkeypatch.setattr(launch, "is_capturing", lambda: True)
    with pytest.raises(D9mError, match="Run the same step once before the capture"):
        run()
    monkeypatch.setattr(separable, "is_capturing", lambda: True)
    with pytest.raises(D9mError, match="has to copy a table for a side of 7 to cuda:0 first"):
        separable.cached_taps(torch.device("cuda:0"), torch.float32, 7, "avg_pool2d")
    assert not withdrawn
    withdrawn.add("sums:add")  # by an earlier step: torch ops, which wait, cannot be captured
    with pytest.raises(D9mError, match="Leave this step out of the graph"):
        run()


def test_an_assertion_on_the_device_is_reported_as_one(install, withdrawn, monkeypatch) -> None:
    """It is the error of an earlier kernel: no advice, no fallback, no kernel withdrawn."""

    def synchronize(_device: torch.device) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    install(RuntimeError("Triton Error [CUDA]: device-side assert triggered"))
    monkeypatch.setattr(launch, "_device_types", {"cuda"})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(torch.AcceleratorError, match="CUDA error: device-side assert"):
        run("cuda")
    load_kernel.cache_clear()
    with pytest.raises(torch.AcceleratorError, match="CUDA error: device-side assert"):
        load_kernel(torch.device("cuda", 0))
    assert not withdrawn


def test_a_lack_of_memory_is_raised(install, withdrawn) -> None:
    """Torch ops would need more memory, not less."""
    install(torch.OutOfMemoryError())
    with pytest.raises(torch.OutOfMemoryError):
        run()
    assert not withdrawn
