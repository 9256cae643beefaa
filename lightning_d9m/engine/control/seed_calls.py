"""The calls with which a program seeds torch's generators: their seeds and lines."""

import sys
from collections import deque
from collections.abc import Callable

import torch

from lightning_d9m.attribute_patches import AttributePatches
from lightning_d9m.program import find_line

# The last calls are enough: a later one replaces what an earlier one did.
_MOST_KEPT = 4


# A random seed is the most frequent cause of a difference, and the line that draws it explains it.
class SeedCalls:
    """Notes each call of ``torch.manual_seed`` and ``torch.seed`` while it is installed.

    Attributes:
        found: Texts such as ``"manual_seed(42) at train.py:7: seed_everything(42)"``.
        are_own: Whether calls are those of this package, which are not noted.
    """

    def __init__(self) -> None:
        self.found: deque[str] = deque(maxlen=_MOST_KEPT)
        self.are_own = False
        self._patches = AttributePatches()
        self._installed = 0

    def install(self, called: Callable[[int], object]) -> Callable[[], None]:
        """Call ``called`` with each seed of ``manual_seed``; return what ends that."""
        # Counted, because a session and the first callback both install it, and either may end
        # first.
        self._installed += 1
        if self._installed == 1:
            # Both functions call this one. To replace them would not reach a program that has
            # imported `manual_seed` by its name, and compilers know them by their identities.
            seed_device = torch.random._seed_custom_device  # noqa: SLF001 - as said

            def note(seed: int) -> None:
                if not self.are_own:
                    # torch.seed, which draws the seed, or manual_seed.
                    is_drawn = sys._getframe(1).f_code.co_name == "seed"  # noqa: SLF001 - as find_line
                    self._note("seed" if is_drawn else "manual_seed", seed)
                    if not is_drawn:  # each of them is new, so no fit repeats another
                        called(seed)
                seed_device(seed)

            self._patches.replace(torch.random, "_seed_custom_device", note)
        return self._release

    def _note(self, name: str, seed: int) -> None:
        line = find_line()
        where = "" if line is None else f" at {line.file}:{line.number}: {line.text}"
        self.found.append(f"{name}({seed}){where}")

    def _release(self) -> None:
        self._installed -= 1
        if not self._installed:
            self._patches.undo()
            self.found.clear()


seed_calls = SeedCalls()
