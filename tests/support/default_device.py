"""A default device that counts for the package alone, so that programs of tests train on a CPU."""

import sys
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

import lightning_d9m

PACKAGE = str(Path(lightning_d9m.__file__).parent)
TORCH = str(Path(torch.__file__).parent)


def is_called_by_package() -> bool:
    """Return whether the innermost frame outside torch and this file is the package's."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((__file__, TORCH)):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(PACKAGE)


class PackageDefault(TorchFunctionMode):
    """Makes on "meta" what the package makes, by torch's functions, too, without a device.

    As ``torch.set_default_device("cuda")`` does on a machine whose device has none of the values.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        unnamed = func in _device_constructors() and kwargs.get("device") is None
        if unnamed and is_called_by_package():
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)
