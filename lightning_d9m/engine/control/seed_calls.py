"""The calls with which a program seeds torch's generators: their seeds and lines."""

import sys
from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import _compile
from torch.jit import _builtins

from lightning_d9m.attribute_patches import AttributePatches
from lightning_d9m.program import find_line

# The last calls are enough: a later one replaces what an earlier one did.
_MOST_KEPT = 4


# A random seed is the most frequent cause of a difference, and the line that draws it explains it.
class SeedCalls:
    """Notes each call of ``torch.manual_seed`` while it is installed, however often that is.

    Attributes:
        found: Texts such as ``"manual_seed(42) at train.py:7: seed_everything(42)"``.
    """

    def __init__(self) -> None:
        self.found: deque[str] = deque(maxlen=_MOST_KEPT)
        self._patches = AttributePatches()
        self._made: dict[Any, Any] = {}  # what replaces each function
        self._installed = 0

    def install(self, called: Callable[[int], object]) -> Callable[[], None]:
        """Wrap the function, and call ``called`` with each seed; return what restores it."""
        # Counted, because a session and the first callback both install it, and either may end
        # first.
        self._installed += 1
        if self._installed == 1:
            # Both names of the function, because a program may call either.
            for owner in (torch, torch.random):
                original = owner.manual_seed
                # Of one function torch._dynamo wraps the first name when it is imported.
                if original not in self._made:
                    self._made[original] = self._wrap(original, called)
                self._patches.replace(owner, "manual_seed", self._made[original])
        return self._release

    def _wrap(
        self, original: Callable[[Any], torch.Generator], called: Callable[[int], object]
    ) -> Any:
        # The attributes of the original would let torch._disable_dynamo call that instead.
        @wraps(original, updated=())
        def note(seed: Any) -> torch.Generator:
            line = find_line()
            where = "" if line is None else f" at {line.file}:{line.number}: {line.text}"
            self.found.append(f"manual_seed({int(seed)}){where}")
            called(int(seed))
            return original(seed)

        return _register(note, original)

    def _release(self) -> None:
        self._installed -= 1
        if self._installed:
            return
        made, self._made = self._made, {}
        now = torch.manual_seed
        self._patches.undo()
        for function in (now, *made.values()):
            if function not in (torch.manual_seed, torch.random.manual_seed):
                _builtins._get_builtin_table().pop(id(function), None)  # noqa: SLF001 - see _register
        was_wrapped = getattr(now, "__wrapped__", None) in made.values()
        if was_wrapped and torch.manual_seed is torch.random.manual_seed:
            # By torch._dynamo, which was imported since and does this once.
            torch.manual_seed = _register(torch.manual_seed, torch.random.manual_seed)
        self.found.clear()


def _register(function: Any, original: Any) -> Any:
    """Return a function for that of torch: traced by neither compiler, as torch has it."""
    if "torch._dynamo" in sys.modules:  # slow to import
        function = _compile._disable_dynamo(function)  # noqa: SLF001 - torch wraps its function in the same way
    table = _builtins._get_builtin_table()  # noqa: SLF001 - torch.jit.script knows functions by id
    if id(original) in table:
        table[id(function)] = table[id(original)]
    return function


seed_calls = SeedCalls()
