"""A default device that counts for the package alone, so that programs of tests train on a CPU."""

import sys
from pathlib import Path

from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

import lightning_d9m

PACKAGE = str(Path(lightning_d9m.__file__).parent)


def is_called_by_package() -> bool:
    """Return whether the package calls what called this file.

    What torch makes for the package, such as the seed of a loader, is the program's.
    """
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(PACKAGE)


class PackageDefault(TorchFunctionMode):
    """Makes on "meta" what the package makes without a device.

    As ``torch.set_default_device("cuda")`` does on a machine whose device has none of the values.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        unnamed = func in _device_constructors() and kwargs.get("device") is None
        if unnamed and is_called_by_package():
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)
