"""Inputs of the kernels of portable bits, and the bits of what they compute."""

from itertools import count

import torch

from lightning_d9m.ops.portability.formulas import KERNELS, OF_TWO

SPECIAL = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1, -1, 2, 0.5, 1e-42, 88.8, -104]
SPECIAL += [709, -745, 1e8, 2**20, 3e38, -3e38, 2**-149, -(2**-130), 0.1, -0.3, 5.5, 1e5]


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def read_bits(values):
    """Return the bits of numbers, of NaNs one, as whole numbers."""
    values = torch.where(values.isnan(), torch.nan, values).contiguous()
    return values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize]).tolist()


def make_numbers(name, size, dtype):
    """Return inputs of an elementary function: any bits, special values, and usual ones."""
    near = draw(size // 4 + 10, dtype=dtype)
    if name == "normal":
        return {"x": 1 - near.abs().frac(), "y": near}
    bits = torch.randint(-(2**63), 2**63 - 1, (size,), generator=torch.Generator().manual_seed(1))
    values = [bits.view(dtype)[:size], torch.tensor(SPECIAL, dtype=dtype)]
    values = torch.cat([*values, near, near * 1e-3, near * 1e6, near.abs().frac()])
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(2))
    return {"x": values, "y": values[order]} if name in OF_TWO else {"x": values}


def make_rows(name, rows, length, dtype=torch.float32, turn=0):
    """Return inputs of a kernel of rows; its lists of numbers have 0 and 1."""
    shapes = {"at": (rows, length), "0": (length,), "r % period": (rows // 2,)}
    seeds, numbers = count(), [0.0, 1.0, 0.3]
    inputs = {
        key: [numbers[(n + turn) % 3] for n in range(place)]
        if isinstance(place, int)
        else draw(*shapes[place], dtype=dtype, seed=next(seeds)).abs()
        for key, place in KERNELS[name].inputs.items()
    }
    _, *absent = name.split("_without_")
    return inputs | dict.fromkeys(absent)
