"""Training steps that run twice; the first value that differs the second time is named.

The second run comes after the first one's backward pass, on the same batch, with generators,
buffers, metrics and gradients put back to what they were; afterwards everything is what the first
run left. Ranks do not exchange gradients in it.
"""

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_d9m.attribute_patches import replace_method
from lightning_d9m.engine.control.seeding import RngState, capture_rng, restore_rng
from lightning_d9m.engine.hashing.training_state import plain_name
from lightning_d9m.engine.ledger.format.records import ProbeKey, ReplayDrift
from lightning_d9m.engine.ledger.kinds import ROOT
from lightning_d9m.engine.probes.module_hooks import hook_model
from lightning_d9m.engine.probes.settings import ProbeSettings
from lightning_d9m.engine.probes.trace import Leaves, Trace, compare_traces
from lightning_d9m.engine.probes.training import ProbePoint
from lightning_d9m.engine.recording.run import Run
from lightning_d9m.engine.state.state import Watch
from lightning_d9m.errors import DriftError, SettingError
from lightning_d9m.integrations.strategies.strategies import is_sharded
from lightning_d9m.integrations.trainer.lightning_private import is_compiled
from lightning_d9m.integrations.trainer.trainer_attributes import Trainer, ranks_of
from lightning_d9m.text import describe_pair

# What a step computes. Weights, optimizers and generators are the input of both runs, and are
# checked or restored.
_COMPARED = frozenset({"input", "output", "grad_output", "local_gradient"})


def _capture(model: Module, values: object) -> tuple[Watch, RngState]:
    """Return what a step may change besides weights and gradients.

    That is the state of the model, without its weights, of further values (the batch, say), and of
    the generators.
    """
    # Buffers of TorchScript are in none of its attributes.
    owners = {"model": model, "values": [values, *model.buffers()]}
    return Watch(owners, leave_out=lambda _, value: isinstance(value, Parameter)), capture_rng()


def _restore(state: tuple[Watch, RngState], model: Module, gradients: list[Tensor | None]) -> None:
    state[0].restore()
    restore_rng(state[1])
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient


class _Step(NamedTuple):
    """The first run of a step, from its beginning."""

    call: tuple[tuple[Any, ...], dict[str, Any]]
    state: tuple[Watch, RngState]
    weights: Trace
    trace: Trace


class Replay:
    """Runs the steps of a fit twice, while it is attached.

    Raises:
        SettingError: When steps of this Trainer cannot be run twice.
    """

    def __init__(self, trainer: Trainer, run: Run) -> None:
        self._trainer, self._module, self._run = trainer, trainer.lightning_module, run
        if not trainer.lightning_module.automatic_optimization:
            raise SettingError(
                "replay_every is on and the module optimizes by hand (automatic_optimization is "
                "False): its training_step changes the weights, so that it cannot be run twice. "
                "Set replay_every=0; probes work there."
            )
        if is_sharded(trainer.strategy):
            raise SettingError(
                f"replay_every is on and the strategy is {type(trainer.strategy).__name__}, "
                "which divides the weights among the ranks within a step, so that it cannot be "
                "run twice. Set replay_every=0, or use a strategy that keeps the whole model on "
                "each rank."
            )
        self._step: _Step | None = None
        self._trace: Trace | None = None
        self._repeating = False

    def attach(self, point: ProbePoint) -> ExitStack:
        """Run the steps of a batch twice, until what is returned is closed."""
        strategy, silenced = self._trainer.strategy, self._run.probes.collector.paused
        with ExitStack() as stack:
            compiled = is_compiled(self._module)
            stack.enter_context(
                hook_model(
                    self._module, ProbeSettings(), _COMPARED, self.add_leaves, is_compiled=compiled
                )
            )
            # The method of the module, which a wrapper such as DDP's calls in the end.
            step, backward = self._module.training_step, strategy.backward

            @functools.wraps(step)
            def first_step(*args: Any, **kwargs: Any) -> Any:
                # The second run calls the same method, and is compared instead of kept.
                if not self._repeating:
                    with silenced():
                        self._begin(args, kwargs)
                return step(*args, **kwargs)

            @functools.wraps(backward)
            def both_backwards(loss: Tensor, optimizer: Any, **kwargs: Any) -> Any:
                first, self._step = self._step, None
                if first is None:
                    return backward(loss, optimizer, **kwargs)
                with silenced():
                    gradients = self._copy_gradients()
                rng = capture_rng()
                self.add_leaves("loss", [("loss", loss)])
                result = backward(loss, optimizer, **kwargs)
                self._take_buffers()
                self._trace = None
                plugin = self._trainer.precision_plugin
                differentiate = functools.partial(
                    plugin.backward, model=self._module, optimizer=optimizer, **kwargs
                )
                with silenced():
                    self._check_weights(first.weights)
                    second = self._repeat(first, gradients, rng, differentiate)
                self._report(point, compare_traces(first.trace, second), len(second.places))
                return result

            replace_method(stack, self._module, "training_step", first_step)
            replace_method(stack, strategy, "backward", both_backwards)
            stack.callback(lambda: vars(self).update(_step=None, _trace=None))
            return stack.pop_all()

    def add_leaves(self, kind: str, leaves: Leaves) -> None:
        """Take values of the run that is going on."""
        # The whole model is called from outside, by a wrapper such as DDP's, the first time only.
        inner = [leaf for leaf in leaves if leaf[0].partition(":")[0] != ROOT]
        if self._trace is not None and inner:
            with self._run.probes.collector.paused():
                self._trace.add_leaves(kind, inner)

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(isinstance(value, Iterator) for value in (*args, *kwargs.values())):
            raise SettingError(
                "replay_every is on and training_step takes the iterator of the dataloader, so "
                "that a batch cannot be had twice. Take `batch` in training_step, or set "
                "replay_every=0."
            )
        self._trace = Trace()
        state, weights = _capture(self._module, (args, kwargs)), self._trace_weights()
        self._step = _Step((args, kwargs), state, weights, self._trace)

    def _copy_gradients(self) -> list[Tensor | None]:
        # When batches accumulate, the second run must add to the same gradients as the first.
        gradients = [parameter.grad for parameter in self._module.parameters()]
        return [None if each is None else each.detach().clone() for each in gradients]

    def _take_buffers(self) -> None:
        buffers = self._module.named_buffers()
        self.add_leaves("buffer", [(plain_name(name), buffer) for name, buffer in buffers])

    def _trace_weights(self) -> Trace:
        weights = Trace()
        named = self._module.named_parameters()
        weights.add_leaves("weight", [(plain_name(name), weight) for name, weight in named])
        return weights

    def _check_weights(self, before: Trace) -> None:
        """Refuse a step that writes to weights: they are not kept, so it would do so twice."""
        written = compare_traces(before, self._trace_weights())
        if written is not None:
            raise SettingError(
                f"replay_every is on and the weight {written[0][1]!r} changes within a training "
                "step or its backward pass, so that a step cannot be run twice. Let the optimizer, "
                "and whatever else writes to weights, do so after the backward pass "
                "(on_train_batch_end, say), or set replay_every=0."
            )

    def _repeat(
        self,
        first: _Step,
        gradients: list[Tensor | None],
        rng: RngState,
        differentiate: Callable[[Tensor], object],
    ) -> Trace:
        """Run a step again, and leave everything as it was before this."""
        (args, kwargs), trainer, module = first.call, self._trainer, self._module
        # What the first run has left is put back afterwards: a deterministic step leaves the same,
        # and one that is not must not change the training by being examined.
        left = _capture(module, first.call)
        left_gradients = [parameter.grad for parameter in module.parameters()]
        self._trace = trace = Trace()
        self._repeating = True
        try:
            _restore(first.state, module, gradients)
            with ExitStack() as stack, torch.enable_grad():
                # Log nothing, and let each rank keep its gradients to itself.
                for name in ("log", "log_dict"):
                    replace_method(stack, module, name, lambda *_, **__: None)
                block = getattr(trainer.strategy, "block_backward_sync", nullcontext)
                stack.enter_context(block())
                with trainer.precision_plugin.train_step_context():
                    output = module.training_step(*args, **kwargs)
                # What Lightning differentiates: divided when batches accumulate, not yet scaled.
                kind = trainer.fit_loop.epoch_loop.automatic_optimization.output_result_cls
                result = kind.from_training_step_output(output, trainer.accumulate_grad_batches)
                loss: Tensor = result.closure_loss  # the first run of the step had one
                # A callback may have drawn between the forward and the backward pass of the first
                # run.
                restore_rng(rng)
                self.add_leaves("loss", [("loss", loss)])
                scaler = getattr(trainer.precision_plugin, "scaler", None)
                differentiate(loss if scaler is None else scaler.scale(loss))
            self._take_buffers()
        finally:
            self._repeating = False
            self._trace = None
            _restore(left, module, left_gradients)
        return trace

    def _report(
        self,
        point: ProbePoint,
        difference: tuple[ProbeKey, str | None, str | None, int] | None,
        total: int,
    ) -> None:
        """Record a difference, and raise it on all ranks or warn of it."""
        ranks = ranks_of(self._trainer)

        def report() -> None:
            if difference is None:
                return
            place, expected, actual, count = difference
            record = ReplayDrift(
                epoch=point.epoch,
                step=point.step,
                batch=point.batch,
                place=place,
                expected=expected,
                actual=actual,
                count=count,
                total=total,
            )
            self._run.probes.collector.catch_up()  # those of the batches before
            self._run.append(record)
            error = _make_error(record, ranks.rank)
            if self._run.options.on_drift != "warn":
                raise error
            warnings.warn(str(error), stacklevel=2)

        # Ranks that found nothing must not continue alone to the next collective.
        ranks.raise_on_all(report)


def _make_error(drift: ReplayDrift, rank: int) -> DriftError:
    kind, name, call = drift.place
    sides = describe_pair(drift.expected or "nothing", drift.actual or "nothing")
    again = f", call {call}" if call else ""
    return DriftError(
        f"A step that was run twice on the same batch, from the same weights, buffers and random "
        f"generators, gave different values (epoch {drift.epoch}, step {drift.step}, batch "
        f"{drift.batch}, rank {rank}). First, in order of execution: {kind} of {name!r}{again}.\n"
        f"  reference: {sides[0]}\n"
        f"  this run:  {sides[1]}\n"
        f"{drift.count} of {drift.total} values differ. Either an operation there is not "
        "deterministic (`d9m locate` names it), or the step reads what cannot be put back (a "
        "clock, a file, a generator of its own), or the hardware makes errors.",
        moment="replay",
        epoch=drift.epoch,
        step=drift.step,
        rank=rank,
        group=kind,
        names=(name,),
        count=drift.count,
        total=drift.total,
        expected=drift.expected or "",
        actual=drift.actual or "",
    )
