"""Attributes of a module that a training step changes."""

import warnings
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric

# Most such attributes change in each step, and looking at all of them takes time.
_WATCHED_STEPS = 2

_Values = dict[tuple[str, str], tuple[object, object]]


class ModuleAttributes:
    """Warns of plain attributes that a training step changes, in the first steps of a fit.

    The micro-batches of a process share them, so their values depend on the number of processes:
    ``self.counter += 1`` counts each of its micro-batches. Buffers do not; `StepBuffers` sees to
    that, and `MetricStates` to the states of metrics.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._left = _WATCHED_STEPS

    def end_step(self) -> None:
        """Count a step of all logical ranks."""
        self._left -= 1

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch the step of one logical rank."""
        if self._left <= 0:
            yield
            return
        before = self._read()
        yield
        after = self._read()
        changed = [place for place in after if before.get(place) != after[place]]
        if changed:
            self._left = 0
            self._warn(*changed[0])

    def _read(self) -> _Values:
        return {
            (path, name): _describe(value)
            for path, module in self._module.named_modules()
            if not isinstance(module, Metric)
            for name, value in vars(module).items()
            if not name.startswith("_")
        }

    def _warn(self, path: str, name: str) -> None:
        full = f"{path}.{name}" if path else name
        warnings.warn(
            f"training_step changes the attribute {full!r} of {type(self._module).__name__}, which "
            "all micro-batches of a process share, so its value depends on the number of "
            "processes. Change it in a hook such as on_train_batch_end, which runs once for each "
            "step, or keep it in a buffer or a metric.",
            stacklevel=2,
        )


def _describe(value: object) -> tuple[object, object]:
    """Return what two reads of an unchanged attribute have in common."""
    if isinstance(value, Tensor):
        return id(value), None if value.is_inference() else value._version  # noqa: SLF001 - torch has no public counter
    plain: Any = value if isinstance(value, int | float | str | bytes | None) else id(value)
    return repr(plain), len(value) if isinstance(value, Sized) else None
