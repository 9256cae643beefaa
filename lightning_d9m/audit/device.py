"""The device of an audit."""

import torch

from lightning_d9m.errors import SettingError


def check_device(device: str) -> None:
    """Check that torch can create a tensor on a device.

    Raises:
        SettingError: It cannot; the message contains torch's error.
    """
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = str(error).strip().splitlines()[0].rstrip(".")
        raise SettingError(
            f"--device is {device!r}, on which torch {torch.__version__} cannot create a tensor: "
            f"{first}. Give an available device, such as cpu, cuda or cuda:1."
        ) from error
