"""``histc`` rounds on CUDA as it does on a CPU."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_d9m.patches.kernels.reductions import histc


class _Divisors(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.div:
            self.seen.append(args[1])
        return func(*args, **(kwargs or {}))


def test_the_divisor_is_a_tensor_on_the_device() -> None:
    # CUDA multiplies by the reciprocal of a number and of a 0-d tensor on the CPU.
    with _Divisors() as divisors:
        histc(torch.empty(9, device="meta"), 7, 0, 7)
    assert len(divisors.seen) == 1
    assert all(isinstance(by, Tensor) and by.device.type == "meta" for by in divisors.seen)
