"""Values that logical ranks log, reduced with the same bits on any number of processes."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_d9m.attribute_patches import AttributePatches
from lightning_d9m.errors import SettingError
from lightning_d9m.lightning import lightning_private
from lightning_d9m.lightning.trainer_attributes import Trainer
from lightning_d9m.logical_ranks.scalars import ExactMean

GatherValues = Callable[[Any], list[Any]]


class LoggedValue:
    """The values that the logical ranks of this process have logged under one name.

    Lightning's result receives the reduced values.
    """

    def __init__(self, result: Any) -> None:
        self.result = result
        self.clear()

    def clear(self) -> None:
        """Forget the values of the last epoch."""
        self._sum = ExactMean()
        self._extreme: float | None = None
        self._step: list[float] = []
        # Those of a step are read together, because each reading waits for an accelerator.
        self._unread: list[tuple[Tensor, int, bool]] = []

    def add(self, value: Tensor, weight: int, *, with_step: bool) -> None:
        """Add a value for a batch of a size, to that of the step only if ``with_step``."""
        self._unread.append(
            (value.detach().to(torch.float64, copy=True).reshape(()), weight, with_step)
        )

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        if unread:
            numbers = torch.stack([value for value, *_ in unread]).tolist()
            for (_, weight, with_step), number in zip(unread, numbers, strict=True):
                self._add(number, weight, with_step=with_step)

    def _add(self, number: float, weight: int, *, with_step: bool) -> None:
        meta = self.result.meta
        if meta.on_step and with_step:
            self._step.append(number)
        if not meta.on_epoch:
            return
        if meta.is_mean_reduction:
            self._sum.add(number, weight)
        elif meta.is_sum_reduction:
            self._sum.add(number)
        else:
            self._merge_extreme(number)

    def take_step(self) -> list[float]:
        """Return the values of this step."""
        self._read()
        step, self._step = self._step, []
        return step

    def capture(self) -> list[Any]:
        """Return the sums of the epoch so far as plain values."""
        self._read()
        return [*self._sum.as_plain(), self._extreme]

    def merge(self, partials: list[float], weight: int, extreme: float | None) -> None:
        """Add the sums of another process."""
        self._sum.merge(partials, weight)
        if extreme is not None:
            self._merge_extreme(extreme)

    def _merge_extreme(self, number: float) -> None:
        choose = max if self.result.meta.is_max_reduction else min
        known = self._extreme
        if known is None or math.isnan(number):
            self._extreme = number
        elif not math.isnan(known):
            self._extreme = choose(known, number)

    def reduce_epoch(self) -> float:
        """Return the value for the epoch."""
        meta = self.result.meta
        if meta.is_mean_reduction:
            return self._sum.mean
        if meta.is_sum_reduction:
            return self._sum.total
        return math.nan if self._extreme is None else self._extreme

    def reduce_step(self, numbers: list[float]) -> float:
        """Return the value for a step, from those of all logical ranks."""
        one = LoggedValue(self.result)
        for number in numbers:
            one.merge([number], 1, number)
        return one.reduce_epoch()


class LoggedValues:
    """The values that are logged in a Trainer's run.

    A value that is logged for an epoch is reduced over all logical ranks, with or without
    ``sync_dist``. One that is logged for a step is reduced with ``sync_dist=True``; otherwise it is
    that of logical rank 0. A value that is logged between steps is that of process 0.

    ``current`` returns the logical rank whose micro-batch is computed now, or None, and
    ``gather`` the plain values of every process.
    """

    def __init__(
        self,
        trainer: Trainer,
        block: range,
        current: Callable[[], int | None],
        gather: GatherValues,
    ) -> None:
        self._trainer = trainer
        self._block = block
        self._current = current
        self._gather = gather
        self._values: dict[int, dict[str, LoggedValue]] = {}
        self._is_epoch_over = False

    def attach(self, patches: AttributePatches) -> None:
        """Let the Trainer's results take their values from here."""
        for results in lightning_private.list_result_collections(self._trainer):
            update = partial(self._update, results, results.update_metrics)
            patches.replace(results, "update_metrics", update)
        connector = lightning_private.get_logger_connector(self._trainer)
        finish_epoch = connector.epoch_end_reached

        def epoch_end_reached() -> None:
            finish_epoch()
            # All names at once, before a hook of one process alone reads the metrics.
            self.finish_epoch()

        patches.replace(connector, "epoch_end_reached", epoch_end_reached)

    def _update(
        self, results: Any, update: Callable[..., None], key: str, value: Any, batch_size: int
    ) -> None:
        """Take a value that is logged, for the logical rank whose step runs."""
        result, rank = results[key], self._current()
        if not result.is_tensor:  # a metric, whose states metric_states keeps by logical rank
            if rank is None or rank == self._block.start:
                update(key, value, batch_size)
            return
        if rank is None:
            self._check_hook(result)
            update(key, value, batch_size)
            if not result.meta.on_epoch or self._is_epoch_over:
                return
        kept = self._keep(results, key)
        if not torch.is_floating_point(value):
            value = value.to(torch.get_default_dtype())
        value = _widen(value)
        sync = result.meta.sync
        first = (self._block.start if rank is None else rank) == 0
        if rank is None:
            if first:
                kept.add(value, batch_size, with_step=False)
        elif first or not sync.rank_zero_only:
            if rank == self._block.start and result.meta.on_step:
                lightning_private.set_step_value(result, value.clone())
            result.value = result.value.to(value.dtype)
            synced = sync.should and not sync.rank_zero_only
            kept.add(value, batch_size, with_step=synced or first)

    def _keep(self, results: Any, key: str) -> LoggedValue:
        """Return what is kept of a name, empty at the start of an epoch."""
        known, result = self._values.setdefault(id(results), {}), results[key]
        if key not in known or known[key].result is not result:
            known[key] = LoggedValue(result)
        elif result.has_reset:
            known[key].clear()
        result.has_reset = False
        lightning_private.set_epoch_value(result, None)
        return known[key]

    def _check_hook(self, result: Any) -> None:
        """Refuse a mean over processes of what a hook sees of its own process alone."""
        meta = result.meta
        if meta.sync.should and "_batch_" in meta.fx and not meta.sync.rank_zero_only:
            raise SettingError(
                f"self.log({meta.name!r}, ..., sync_dist=True) is called in {meta.fx}, which runs "
                "once for all micro-batches of a process: log the value in the step itself, where "
                "every logical rank has one, or leave out sync_dist."
            )

    def capture(self) -> dict[str, Any]:
        """Return the sums of the training epoch so far, as plain values."""
        results = lightning_private.list_result_collections(self._trainer)[0]
        return {
            key: value.capture()
            for key, value in self._values.get(id(results), {}).items()
            if value.result is results.get(key) and not value.result.has_reset
        }

    def restore(self, parts: list[dict[str, Any]], *, here: bool) -> None:
        """Continue a training epoch, whose results Lightning holds again.

        ``parts`` has the sums that each process captured; one process (``here``) adds them
        to its own.
        """
        results = lightning_private.list_result_collections(self._trainer)[0]
        known = self._values.setdefault(id(results), {})
        for part in parts:
            for key, sums in part.items():
                if key in results:
                    value = known.setdefault(key, LoggedValue(results[key]))
                    if here:
                        value.merge(*sums)

    def take_step(self) -> dict[str, list[float]]:
        """Return what the logical ranks of this process have logged for a step, by name."""
        known = self._values.get(id(lightning_private.get_current_results(self._trainer)), {})
        self._is_epoch_over = False
        return {key: step for key, value in known.items() if (step := value.take_step())}

    def set_step(self, parts: list[dict[str, list[float]]]) -> None:
        """Set the values of a step, given what each process has taken."""
        known = self._values.get(id(lightning_private.get_current_results(self._trainer)), {})
        by_key: dict[str, list[float]] = {}
        for part in parts:
            for key, step in part.items():
                by_key.setdefault(key, []).extend(step)
        for key, step in by_key.items():
            if key in known:
                result = known[key].result
                number = known[key].reduce_step(step)
                lightning_private.set_step_value(result, _like(result, number))

    def finish_epoch(self) -> None:
        """Reduce what was logged for an epoch."""
        self._is_epoch_over = True
        results = lightning_private.get_current_results(self._trainer)
        found = dict(self._valid(results))
        parts = self._gather({key: value.capture() for key, value in found.items()})
        for key, value in found.items():
            whole = LoggedValue(value.result)
            for part in parts:
                if key in part:
                    whole.merge(*part[key])
            lightning_private.set_epoch_value(
                value.result, _like(value.result, whole.reduce_epoch())
            )

    def _valid(self, results: Any) -> Iterator[tuple[str, LoggedValue]]:
        known = self._values.get(id(results), {})
        for key, result in results.valid_items():
            value = known.get(key)
            computed = lightning_private.get_epoch_value(result) is not None
            if value is None or value.result is not result or computed:
                continue
            if result.meta.on_epoch:
                yield key, value


def _widen(value: Tensor) -> Tensor:
    """Return the value in the type in which Lightning keeps it."""
    return value if value.dtype in (torch.float32, torch.float64) else value.float()


def _like(result: Any, number: float) -> Tensor:
    return torch.tensor(number, dtype=result.value.dtype, device=result.value.device)
