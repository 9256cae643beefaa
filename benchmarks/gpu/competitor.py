"""Work beside a call that is repeated, so that a race in it shows."""

import random
from collections import deque

import torch

SIDES = (256, 1024, 4096)  # of the matrices that a second stream multiplies
MOST_BYTES = 2**26
HELD = 8  # allocations that are alive at once


class Competitor:
    """Occupies the device from a second stream, and moves the addresses of what is allocated.

    Args:
        device: ``"cuda"`` or ``"cpu"``; on a CPU only addresses move.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._draws = random.Random(0)  # noqa: S311 - for variety
        self._held: deque[torch.Tensor] = deque(maxlen=HELD)
        self._stream = torch.cuda.Stream() if device == "cuda" else None
        self._matrices = (
            [torch.randn(side, side, device=device) for side in SIDES] if self._stream else []
        )

    def disturb(self, turn: int) -> None:
        """Enqueue between no product and several ones, short and long, and allocate memory."""
        size = self._draws.randrange(1, MOST_BYTES if self._stream else 2**16)
        self._held.append(torch.empty(size, dtype=torch.uint8, device=self._device))
        if self._stream is None or turn % 4 == 0:  # every fourth call runs alone
            return
        with torch.cuda.stream(self._stream):
            for _ in range(self._draws.randrange(1, 4)):
                matrix = self._draws.choice(self._matrices)
                matrix @ matrix
