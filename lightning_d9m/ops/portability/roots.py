"""Square roots that are correctly rounded."""

import numpy as np
import torch
from torch import Tensor


def find_root(values: Tensor) -> Tensor:
    """Return the roots of float32 or float64 numbers.

    NumPy's are the processor's; those of torch come from MKL, which may be off by one unit.
    """
    if values.device.type != "cpu":
        return values.sqrt()
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.asarray(np.sqrt(values.detach().numpy())))
