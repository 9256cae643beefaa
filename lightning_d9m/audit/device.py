"""The device of an audit."""

import torch

from lightning_d9m.errors import SettingError


def check_device(device: str) -> None:
    """Raise if no tensor can be made on a device.

    Raises:
        SettingError: With what torch says.
    """
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = str(error).strip().splitlines()[0].rstrip(".")
        raise SettingError(
            f"--device is {device!r}, on which torch {torch.__version__} makes no tensor: {first}. "
            "Name a device that it has, such as cpu, cuda or cuda:1."
        ) from error
