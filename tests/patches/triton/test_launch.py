"""Use of Triton kernels: when torch ops take over."""

import re
import warnings
from collections.abc import Callable, Iterator
from subprocess import CalledProcessError
from types import SimpleNamespace

import pytest
import torch
from simulated_device import put
from torch import Tensor

from lightning_d9m.errors import D9mError
from lightning_d9m.hashing.digest import _load_kernel
from lightning_d9m.patches.registration import Kernel
from lightning_d9m.patches.triton import launch

KEYS = torch._C._dispatch_keys(torch.empty(0))
RELU = torch.ops.aten.relu.default


@pytest.fixture(autouse=True)
def withdrawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Let kernels run on the CPU, and forget which ones were withdrawn."""
    names: set[str] = set()
    monkeypatch.setattr(launch, "_withdrawn", names)
    monkeypatch.setattr(launch, "_device_types", {"cpu"})
    return names


def install(monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., object]) -> None:
    """Let every path name one kernel."""
    monkeypatch.setattr(launch, "resolve_name", lambda path: kernel)


def test_a_kernel_runs_in_place_of_torch_ops(monkeypatch) -> None:
    """And is noted, once for each use, in the innermost block."""
    install(monkeypatch, lambda x, by: x + by)
    with launch.kernels_noted() as used:
        assert launch.run_kernel("pool:forward", torch.mul, torch.ones(1), 3).item() == 4
        with launch.kernels_noted() as inner:
            launch.run_kernel("pool:backward", torch.mul, torch.ones(1), 3)
        launch.run_kernel("pool:forward", torch.mul, torch.ones(1), 3)
    assert used == ["pool:forward", "pool:forward"]
    assert inner == ["pool:backward"]
    launch.run_kernel("pool:forward", torch.mul, torch.ones(1), 3)
    assert used == ["pool:forward", "pool:forward"]


def test_no_kernel_runs_on_another_device(monkeypatch) -> None:
    """The CPU computes with torch ops, without a warning and without Triton."""
    monkeypatch.setattr(launch, "_device_types", {"cuda"})
    install(monkeypatch, lambda *args: pytest.fail("not reached"))
    with launch.kernels_noted() as used:
        assert launch.run_kernel("pool:forward", torch.mul, torch.ones(1), 3).item() == 3
    assert used == []


class TritonError(Exception):
    """Stands for Triton's own error, whose base class is Exception."""


def test_a_first_use_while_a_graph_is_captured_is_refused(monkeypatch, withdrawn) -> None:
    """The kernel is not withdrawn: it works after the step has run once."""

    def fail(*_args: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    install(monkeypatch, fail)
    monkeypatch.setattr(launch, "is_capturing", lambda: True)
    with pytest.raises(D9mError, match="Run the same step once before the capture"):
        launch.run_kernel("pool:forward", torch.mul, torch.ones(1), 3)
    assert not withdrawn


@pytest.mark.parametrize(
    ("error", "advises"),
    [
        (RuntimeError("Failed to find C compiler."), True),
        (ModuleNotFoundError("No module named 'triton'"), True),
        (CalledProcessError(1, ["gcc"]), True),
        (TritonError("out of resource: shared memory"), False),
        (RuntimeError("Triton Error [CUDA]: invalid argument"), False),
    ],
)
def test_torch_ops_replace_a_kernel_that_fails(monkeypatch, withdrawn, error, advises) -> None:
    """One warning, then nothing more is tried; it advises to install what is missing."""

    def fail(*_args: object) -> None:
        calls.append(1)
        raise error

    calls: list[int] = []
    install(monkeypatch, fail)
    reason = re.escape(f"pool:forward cannot be used ({type(error).__name__}: {error}")
    with pytest.warns(UserWarning, match=f"{reason}.*Torch ops") as caught:
        assert launch.run_kernel("pool:forward", torch.mul, torch.ones(1), 3).item() == 3
    assert ("gcc and Python's headers" in str(caught[0].message)) == advises
    with warnings.catch_warnings(action="error"):
        assert launch.run_kernel("pool:forward", torch.mul, torch.ones(1), 3).item() == 3
    assert len(calls) == 1
    assert withdrawn == {"pool:forward"}


def test_an_assertion_on_the_device_is_reported_as_one(monkeypatch, withdrawn) -> None:
    """It is the error of an earlier kernel: no advice, no fallback, no kernel withdrawn."""

    def fail(*_args: object) -> None:
        raise RuntimeError("Triton Error [CUDA]: device-side assert triggered")

    def synchronize(_device: torch.device) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    install(monkeypatch, fail)
    monkeypatch.setattr(launch, "_device_types", {"cuda"})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(torch.AcceleratorError, match="CUDA error: device-side assert"):
        launch.run_kernel("pool:forward", torch.mul, put(torch.ones(1)), 3)
    _load_kernel.cache_clear()
    with pytest.raises(torch.AcceleratorError, match="CUDA error: device-side assert"):
        _load_kernel(torch.device("cuda", 0))
    assert not withdrawn


def test_a_lack_of_memory_is_raised(monkeypatch, withdrawn) -> None:
    """Torch ops would need more memory, not less."""

    def fail(*_args: object) -> None:
        raise torch.OutOfMemoryError

    install(monkeypatch, fail)
    with pytest.raises(torch.OutOfMemoryError):
        launch.run_kernel("pool:forward", torch.mul, torch.ones(1), 3)
    assert not withdrawn


def make_op(torch_ops: Callable[[Tensor], Tensor]) -> Kernel:
    """Return a checked replacement that has a Triton kernel; torch's kernel returns -1."""

    def replacement(original: object, x: Tensor) -> Tensor:
        return launch.run_kernel("pool:forward", torch_ops, x)

    def original(keyset: object, x: Tensor) -> Tensor:
        return torch.full_like(x, -1)

    return Kernel(replacement, original, RELU._schema, offered=False, check=True)


def on_cpu_with_torch_ops(monkeypatch: pytest.MonkeyPatch, module: object) -> None:
    """Compute the reference as the CPU does: without kernels."""
    compare = module.agrees_with_cpu

    def without_kernels(*args: object) -> object:
        with monkeypatch.context() as patch:
            patch.setattr(launch, "_device_types", {"cuda"})
            return compare(*args)

    monkeypatch.setattr(module, "agrees_with_cpu", without_kernels)


def test_a_kernel_with_a_wrong_result_is_replaced_by_torch_ops(monkeypatch, withdrawn) -> None:
    """The first call returns what torch ops give, and torch's own kernel is not used."""
    from lightning_d9m.patches import registration

    on_cpu_with_torch_ops(monkeypatch, registration)
    install(monkeypatch, lambda x: x + 2)
    kernel = make_op(lambda x: x + 1)
    with pytest.warns(UserWarning, match="aten::relu gave a different result with it than"):
        assert kernel(KEYS, torch.zeros(2)).tolist() == [1, 1]
    assert withdrawn == {"pool:forward"}
    with warnings.catch_warnings(action="error"):
        assert kernel(KEYS, torch.zeros(2)).tolist() == [1, 1]


def test_a_kernel_with_the_right_result_stays(monkeypatch, withdrawn) -> None:
    """No warning."""
    from lightning_d9m.patches import registration

    on_cpu_with_torch_ops(monkeypatch, registration)
    install(monkeypatch, lambda x: x + 1)
    kernel = make_op(lambda x: x + 1)
    assert kernel(KEYS, torch.zeros(2)).tolist() == [1, 1]
    assert not withdrawn


def test_offsets_are_counted_past_the_last_block() -> None:
    """A strided tensor may reach far with few elements."""
    one = torch.empty(1, dtype=torch.int8)
    limit = 2**31 - 1 - 512
    assert not launch.needs_int64(one, one.as_strided((limit,), (0,)))
    assert launch.needs_int64(one, one.as_strided((limit + 1,), (0,)))
    far = SimpleNamespace(shape=(2, 3), stride=lambda: (2**31, 1), numel=lambda: 6)
    assert launch.needs_int64(far)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_floats_are_passed_by_their_bits(dtype) -> None:
    """The kernel reads the same number."""
    bits = launch.encode_float(1 / 3, dtype)
    integer = torch.int64 if dtype == torch.float64 else torch.int32
    assert torch.tensor(bits, dtype=integer).view(dtype) == torch.tensor(1 / 3, dtype=dtype)


def test_allocated_memory_has_the_layout() -> None:
    """Contiguous, like another tensor, or in a given format; nothing is filled."""
    like = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert launch.allocate((2, 3, 6, 7), like).stride() == (126, 1, 21, 3)
    plain = launch.allocate((2, 3, 6, 7), like.half(), torch.contiguous_format)
    assert (plain.dtype, plain.stride()) == (torch.float16, (126, 42, 7, 1))


def test_volumes_have_five_dimensions() -> None:
    """With and without a batch."""
    assert launch.view_as_volumes(torch.ones(2, 3, 4), 1).shape == (2, 3, 1, 1, 4)
    assert launch.view_as_volumes(torch.ones(3, 4, 5), 2).shape == (1, 3, 1, 4, 5)
    assert launch.view_as_volumes(torch.ones(2, 3, 4, 5, 6), 3).shape == (2, 3, 4, 5, 6)
