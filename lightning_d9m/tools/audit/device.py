"""The device of a training: whether it works."""

import time
import warnings

import torch

from lightning_d9m.engine.control.doctor import CheckResult
from lightning_d9m.engine.control.session import deterministic
from lightning_d9m.engine.hashing.digest import digest_many

_SIZES = (0, 1, 3, 1021, 40_000, 300_007)  # elements: several chunks, and ends of each kind


def compute_examples(device: torch.device) -> list[torch.Tensor]:
    """Return results of patched ops, one for each Triton kernel; no addition in them rounds."""
    # Small whole numbers: the sums are exact, so the CPU's result is the only right one.
    rows = torch.arange(12, dtype=torch.float32, device=device)
    index = torch.tensor([0, 1, 1], device=device)
    image = rows[:4].view(1, 1, 2, 2).requires_grad_()
    wide = torch.nn.functional.interpolate(image, scale_factor=2, mode="bilinear")
    return [
        torch.zeros(2, 4, device=device).index_add(0, index, rows.view(3, 4)),
        *torch.autograd.grad(wide, image, torch.ones_like(wide)),
    ]


def try_device(device: torch.device) -> CheckResult:
    """Open a session, and compare digests and patched ops of a device with those of the CPU.

    Any error or warning is a problem; each Triton kernel that cannot be used is a warning.
    """
    begin = time.monotonic()
    problems = []
    with warnings.catch_warnings(record=True) as caught:
        # Python shows a warning once for each place, and an earlier check may have shown it.
        warnings.simplefilter("always")
        try:
            with deterministic(seed=0):
                tensors = [
                    torch.arange(size, dtype=torch.float32, device="cpu").sin() for size in _SIZES
                ]
                there = [tensor.to(device) for tensor in tensors]
                if digest_many(there) != digest_many(tensors):
                    problems.append("digests on the device differ from those of the CPU")
                known = compute_examples(torch.device("cpu"))
                if not all(
                    map(torch.equal, map(torch.Tensor.cpu, compute_examples(device)), known)
                ):
                    problems.append("patched ops on the device differ from the CPU's")
        except Exception as error:  # noqa: BLE001 - the check reports every failure
            problems.append(f"{type(error).__name__}: {error}")
    # A kernel that is replaced by torch ops warns and still gives the right bits.
    problems += [str(warning.message) for warning in caught]
    seconds = f"{time.monotonic() - begin:.1f} s"
    if not problems:
        found = f"a session opens; digests and patched ops are the CPU's (checked in {seconds})"
        return CheckResult(f"device {device}", "ok", found)
    return CheckResult(
        f"device {device}",
        "problem",
        f"{'; '.join(problems)} (checked in {seconds})",
        "Trainings on this device may fail, or run without the kernels of lightning_d9m.",
        "Remove the first cause, and run d9m doctor again.",
    )
