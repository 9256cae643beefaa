"""The calls with which a program seeds torch's generators: their seeds and lines.

A random seed is the most frequent cause of a difference, and the line that draws it explains it.
"""

from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from lightning_d9m.attribute_patches import AttributePatches
from lightning_d9m.program import find_line

# The last calls are enough: a later one replaces what an earlier one did.
_MOST_KEPT = 4


class SeedCalls:
    """Notes each call of ``torch.manual_seed`` while it is installed, however often that is.

    Attributes:
        found: Texts such as ``"manual_seed(42) at train.py:7: seed_everything(42)"``.
    """

    def __init__(self) -> None:
        self.found: deque[str] = deque(maxlen=_MOST_KEPT)
        self._patches = AttributePatches()
        self._installed = 0

    def install(self, called: Callable[[int], object]) -> Callable[[], None]:
        """Wrap the function, and call ``called`` with each seed; return what restores it."""
        self._installed += 1
        if self._installed == 1:
            for owner in (torch, torch.random):  # which have different functions
                self._patches.replace(owner, "manual_seed", self._wrap(owner.manual_seed, called))
        return self._release

    def _wrap(
        self, original: Callable[[Any], torch.Generator], called: Callable[[int], object]
    ) -> Callable[[Any], torch.Generator]:
        @wraps(original)
        def note(seed: Any) -> torch.Generator:
            line = find_line()
            where = "" if line is None else f" at {line.file}:{line.number}: {line.text}"
            self.found.append(f"manual_seed({int(seed)}){where}")
            called(int(seed))
            return original(seed)

        return note

    def _release(self) -> None:
        self._installed -= 1
        if not self._installed:
            self._patches.undo()
            self.found.clear()


seed_calls = SeedCalls()
