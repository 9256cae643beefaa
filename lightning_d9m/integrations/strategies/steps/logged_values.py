"""Values that logical ranks log, reduced with the same bits on any number of processes."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_d9m.attribute_patches import AttributePatches
from lightning_d9m.errors import SettingError
from lightning_d9m.integrations.trainer import lightning_private
from lightning_d9m.integrations.trainer.trainer_attributes import Trainer


def sum_exactly(values: Sequence[float]) -> float:
    """Return the correctly rounded sum; with infinities and NaNs, what IEEE 754 says.

    Neither the order of the values nor the number of processes that hold them changes a bit.

    >>> sum_exactly([1e100, 1.0, -1e100])
    1.0
    """
    # A fraction holds no such values.
    special = {value for value in values if not math.isfinite(value)}
    if special:
        return special.pop() if len(special) == 1 else math.nan
    total = sum(map(Fraction, values), Fraction(0))
    try:
        return float(total)
    except OverflowError:
        # As IEEE 754 rounds what is above the largest number.
        return math.inf if total > 0 else -math.inf


def add_exactly(partials: list[float], number: float) -> list[float]:
    """Return partial sums whose sum is not rounded; they do not overlap, unless that is too large.

    So merging the sums of two processes gives the bits that one would have got.
    """
    given, kept = [*partials, number], list[float]()
    # Of numbers whose sum is not finite all are kept: their sum is exact in any case.
    with suppress(OverflowError, ValueError):
        while math.isfinite(rest := math.fsum((*given, *(-each for each in kept)))):
            if rest == 0:
                return kept
            kept.append(rest)  # what the sum of the ones before has been rounded by
    return given


class LoggedValue:
    """The values that all logical ranks have logged under one name in an epoch, not rounded.

    Lightning's result receives the reduced values.

    Attributes:
        result: It.
        partials: Partial sums of the weighted values, see `add_exactly`, or the extreme alone.
        weight: The sum of the weights.
    """

    def __init__(self, result: Any) -> None:
        self.result = result
        self.partials: list[float] = []
        self.weight = 0

    def add(self, number: float, weight: int = 1) -> None:
        """Add a value of float32 for a batch of a size; their product is exact."""
        self.merge([number * weight if self.result.meta.is_mean_reduction else number], weight)

    def merge(self, partials: list[float], weight: int) -> None:
        """Add the sums that were captured."""
        self.weight += weight
        for number in partials:
            if self._is_extreme:
                choose = max if self.result.meta.is_max_reduction else min
                extremes = [*self.partials, number]
                self.partials = [math.nan if any(map(math.isnan, extremes)) else choose(extremes)]
            else:
                self.partials = add_exactly(self.partials, number)

    @property
    def _is_extreme(self) -> bool:
        return not (self.result.meta.is_mean_reduction or self.result.meta.is_sum_reduction)

    def reduce(self) -> Tensor:
        """Return the value of the added ones, as Lightning keeps it."""
        value = self.result.value
        if self._is_extreme:
            number = self.partials[0] if self.partials else math.nan
        else:
            number = sum_exactly(self.partials)
        if self.result.meta.is_mean_reduction:
            number = number / self.weight if self.weight else math.nan
        return torch.tensor(number, dtype=value.dtype, device=value.device)


class LoggedValues:
    """The values that are logged in a Trainer's run.

    A value that is logged for an epoch is reduced over all logical ranks, with or without
    ``sync_dist``. One that is logged for a step is reduced with ``sync_dist=True``; otherwise it is
    that of logical rank 0. A value that is logged between steps is that of process 0.

    Every process adds the values of all, after each step and at the end of the epoch.

    ``processes`` is the strategy, and ``current`` returns the logical rank whose micro-batch is
    computed now, or None.
    """

    def __init__(self, trainer: Trainer, processes: Any, current: Callable[[], int | None]) -> None:
        self._trainer = trainer
        self._block: range = processes.block
        self._gather: Callable[[Any], list[Any]] = processes.gather_values
        self._current = current
        self._values: dict[int, dict[str, LoggedValue]] = {}
        # The name, value, size of the batch, and whether it counts for the step. Those of a step
        # are read together, because each reading waits for an accelerator.
        self._pending: dict[int, list[tuple[str, Tensor, int, bool]]] = {}
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
            # What a hook logs between steps is seen once by each process, so its weight would
            # depend on their number.
            self._check_hook(result)
            update(key, value, batch_size)
            if not result.meta.on_epoch or self._is_epoch_over:
                return
        self._keep(results, key)
        if not torch.is_floating_point(value):
            # As Lightning does with integers and booleans, so that the result has the dtype that a
            # program expects.
            value = value.to(torch.get_default_dtype())
        if value.dtype not in (torch.float32, torch.float64):
            value = value.float()  # in which Lightning keeps it
        sync = result.meta.sync
        # Between steps no logical rank runs; process 0 counts then for the first.
        first = (self._block.start if rank is None else rank) == 0
        counts = first or not (rank is None or sync.rank_zero_only)
        if counts and rank is not None:
            if rank == self._block.start and result.meta.on_step:
                result._forward_cache = value.clone()  # noqa: SLF001 - of torchmetrics
            result.value = result.value.to(value.dtype)
        if counts:
            synced = sync.should and not sync.rank_zero_only
            number = value.detach().to(torch.float64, copy=True).reshape(())
            # Without `sync_dist` a step shows the value of logical rank 0 alone, as rank 0 of DDP
            # logs its own.
            entry = key, number, batch_size, rank is not None and (synced or first)
            self._pending.setdefault(id(results), []).append(entry)

    def _keep(self, results: Any, key: str) -> None:
        """Keep sums of a name, which are empty at the start of an epoch."""
        known, result = self._values.setdefault(id(results), {}), results[key]
        if key not in known or known[key].result is not result or result.has_reset:
            known[key] = LoggedValue(result)
        result.has_reset = False
        result._computed = None  # noqa: SLF001 - of torchmetrics

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
        """Return the sums of the training epoch so far, as plain values; from process 0 alone."""
        results = lightning_private.list_result_collections(self._trainer)[0]
        found: dict[str, Any] = {}
        # Every process has added the values of all, so that one of them is enough, and a resume on
        # more processes does not add them twice.
        for key, value in self._values.get(id(results), {}).items() if 0 in self._block else ():
            if value.result is results.get(key) and not value.result.has_reset:
                whole = LoggedValue(value.result)
                whole.merge(value.partials, value.weight)
                for name, number, weight, _ in self._pending.get(id(results), ()):
                    if name == key and value.result.meta.on_epoch:
                        whole.add(number.item(), weight)
                found[key] = [whole.partials, whole.weight]
        return found

    def restore(self, parts: list[dict[str, Any]]) -> None:
        """Continue a training epoch, whose results Lightning holds again.

        ``parts`` has the sums that processes captured.
        """
        results = lightning_private.list_result_collections(self._trainer)[0]
        known = self._values.setdefault(id(results), {})
        for part in parts:
            for key, sums in part.items():
                if key in results:
                    known.setdefault(key, LoggedValue(results[key])).merge(*sums)

    def take(self) -> dict[str, list[Any]]:
        """Return what this process has logged since the last step, by name."""
        self._is_epoch_over = False
        results = lightning_private.get_current_results(self._trainer)
        pending = self._pending.pop(id(results), [])
        numbers = torch.stack([value for _, value, *_ in pending]).tolist() if pending else []
        found: dict[str, list[Any]] = {}
        for (key, _, weight, with_step), number in zip(pending, numbers, strict=True):
            found.setdefault(key, []).append([number, weight, with_step])
        return found

    def add(self, parts: list[dict[str, list[Any]]], *, with_step: bool = True) -> None:
        """Add what each process has taken, and set the values of a step."""
        results = lightning_private.get_current_results(self._trainer)
        for key, value in self._values.get(id(results), {}).items():
            step = LoggedValue(value.result)
            for number, weight, of_step in (entry for part in parts for entry in part.get(key, ())):
                if value.result.meta.on_epoch:
                    value.add(number, weight)
                if value.result.meta.on_step and of_step and with_step:
                    step.add(number)
            if step.weight:
                step.result._forward_cache = step.reduce()  # noqa: SLF001 - of torchmetrics

    def finish_epoch(self) -> None:
        """Reduce what was logged for an epoch."""
        # What was logged after the last step, such as in `on_validation_epoch_end`.
        self.add(self._gather(self.take()), with_step=False)
        self._is_epoch_over = True
        results = lightning_private.get_current_results(self._trainer)
        known = self._values.get(id(results), {})
        for key, result in results.valid_items():
            value = known.get(key)
            if value is None or value.result is not result or not result.meta.on_epoch:
                continue
            # Lightning reduces a result when it is read first, and then keeps what it has computed.
            if result._computed is None:  # noqa: SLF001 - of torchmetrics
                result._computed = value.reduce()  # noqa: SLF001 - of torchmetrics
