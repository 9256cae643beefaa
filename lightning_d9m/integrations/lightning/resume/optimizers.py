"""Gradients, parameters that are trained, groups of optimizers, schedulers of learning rates."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from lightning_d9m.engine.hashing.digest import digest_many
from lightning_d9m.engine.state.parts import is_of_lightning
from lightning_d9m.engine.state.state import search
from lightning_d9m.integrations.lightning.resume.part import Moment, Part, Phase
from lightning_d9m.integrations.strategies.strategies import is_sharded
from lightning_d9m.integrations.trainer import lightning_private
from lightning_d9m.integrations.trainer.packages import rank_zero
from lightning_d9m.integrations.trainer.trainer_attributes import (
    get_logical_ranks,
    get_logical_steps,
    like_parameter,
    list_schedulers,
    local_shard,
    name_callbacks,
)
from lightning_d9m.text import pluralize

_OTHER_GROUPS = (
    "The checkpoint was saved with other parameters in the groups of the optimizer {} ({} and {} "
    "of them), whose state would go to the wrong ones. Make the groups of the same parameters."
)
_OTHER_SHAPE = (
    "The checkpoint has a gradient of {} of shape {} on this rank, and the part of the parameter "
    "here has {}. Divide the model among the ranks as in the run that saved it."
)
_OTHER_BUFFER = (
    "The checkpoint has a buffer {} of shape {} of this rank, and the one here has {}. Make the "
    "model as in the run that saved it."
)
_OTHER_SCHEDULERS = (
    "The checkpoint was saved with the learning rate schedulers {}, and this run has {}. A "
    "callback that replaces one in on_train_epoch_start must keep it in an attribute; one that "
    "does so in another hook must do it again when it is resumed."
)


def _place(tensor: torch.Tensor) -> Any:
    return getattr(tensor, "placements", None)


class Gradients(Part):
    """Gradients by the names of their parameters; none with logical ranks.

    They are those to which a backward pass after the save may add. Lightning zeroes gradients
    before the first backward pass of a step; a module that optimizes manually, or overrides
    ``optimizer_zero_grad``, may keep them.
    """

    name, restored, checked = "gradients", ("epoch", "batch"), "train"

    def capture(self, _phase: Phase) -> dict[str, Any]:
        trainer, module = self.trainer, self.trainer.lightning_module
        # Which of them the program zeroes next, nothing tells: all are kept, at the price of a
        # larger checkpoint. Leaving out those of a finished step needed a watch in each resumed run
        # that they are not added to, and refused programs that do so.
        own = not module.automatic_optimization or not is_of_lightning(module.optimizer_zero_grad)
        adds = own or lightning_private.accumulates_gradients(trainer)
        # Logical ranks clear all gradients before each micro-batch.
        if not adds or get_logical_steps(trainer) is not None:
            return {}
        held = {n: own for n, own in module.named_parameters() if own.grad is not None}
        # A partial sum, which is reduced in the step, has no form: a rank would have all of it.
        partial = [n for n, own in held.items() if _place(own.grad) != _place(own)]
        self.fit.unknown += [f"model.{name}.grad" for name in partial]
        shards = {n: local_shard(own.grad) for n, own in held.items() if n not in partial}
        return {n: own.detach().to("cpu", copy=True) for n, own in shards.items()}

    def restore(self, state: dict[str, Any], _moment: Moment) -> None:
        if not state:
            return
        for name, parameter in self.trainer.lightning_module.named_parameters():
            kept = state.get(name)
            if kept is None or kept.shape != local_shard(parameter).shape:
                # None and not zeros: an optimizer leaves out a parameter without a gradient, and
                # applies weight decay and momentum to one with zeros.
                parameter.grad = None
            else:
                parameter.grad = like_parameter(kept, parameter)

    def problems(self, state: Any) -> list[str]:
        named = self.trainer.lightning_module.named_parameters()
        return [
            _OTHER_SHAPE.format(name, tuple(state[name].shape), tuple(local_shard(own).shape))
            for name, own in named
            if name in state and state[name].shape != local_shard(own).shape
        ][:1]


class Buffers(Part):
    """The buffers that a rank other than 0 has changed, or any rank that has a part of the model.

    A checkpoint has those of one rank. The others get these with DDP's next forward pass in
    training, and a validation, or the end of an epoch, may come before that; with FSDP never.
    """

    name, form, restored, checked = "buffers", dict[str, torch.Tensor], ("train",), "train"

    def _read(self) -> dict[str, torch.Tensor]:
        trainer = self.trainer
        saved = trainer.is_global_zero and not is_sharded(trainer.strategy)
        if saved or trainer.world_size == 1 or get_logical_ranks(trainer) is not None:
            return {}
        # A buffer that is divided itself is saved by all ranks.
        buffers = ((name, own) for name, own in self.fit.tensors.listed[1] if not is_lazy(own))
        return {name: own for name, own in buffers if _place(own) is None}

    def _digest(self) -> dict[str, str]:
        named = self._read()
        return dict(zip(named, digest_many([*named.values()]), strict=True))

    def begin(self) -> None:
        self._first = self._digest()

    def capture(self, _phase: Phase) -> dict[str, torch.Tensor]:
        first = self._first if self.fit.has_begun else self._digest()
        changed = dict(self._digest().items() - first.items())
        return {
            n: own.detach().to("cpu", copy=True) for n, own in self._read().items() if n in changed
        }

    def restore(self, state: dict[str, torch.Tensor], _moment: Moment) -> None:
        for name, own in self._read().items():
            if name in state and state[name].shape == own.shape:
                own.data.copy_(state[name])

    def problems(self, state: dict[str, torch.Tensor]) -> list[str]:
        shapes = {name: own.shape for name, own in self._read().items()}
        return [
            _OTHER_BUFFER.format(name, [*own.shape], [*shapes.get(name, ())])
            for name, own in state.items()
            if own.shape != shapes.get(name)
        ]


class Frozen(Part):
    """The names of the parameters that are not trained.

    Callbacks and hooks freeze and unfreeze parameters at the start of an epoch.
    """

    name, form, scope, restored = "frozen", list[str], "run", ("train",)

    def capture(self, _phase: Phase) -> list[str]:
        return [name for name, own in self.fit.tensors.listed[0] if not own.requires_grad]

    def restore(self, state: list[str], _moment: Moment) -> None:
        frozen, changed = {*state}, []
        for name, parameter in self.trainer.lightning_module.named_parameters():
            if parameter.requires_grad == (name in frozen):
                parameter.requires_grad_(not parameter.requires_grad)
                changed.append(name)
        if changed:
            rank_zero().rank_zero_info(
                f"{pluralize(len(changed), 'parameter')} frozen or unfrozen as when the "
                f"checkpoint was saved, {changed[0]} first. To train others, load its weights "
                "without ckpt_path."
            )


class Groups(Part):
    """The names of the parameters in each group of each optimizer, in their order."""

    name, form, scope = "optimizer_groups", list[list[list[str]]], "run"

    def capture(self, _phase: Phase) -> list[list[list[str]]]:
        names = {id(own): name for name, own in self.trainer.lightning_module.named_parameters()}
        return [
            [[names.get(id(own), "") for own in group["params"]] for group in own.param_groups]
            for own in self.trainer.optimizers
        ]

    def sort(self, states: list[Any], saved: list[list[list[str]]]) -> list[Any]:
        """Return the states of optimizers with the parameters in the order of this run.

        Lightning loads them, and not this part.
        """
        found, problems = [], []
        groups = zip(states, saved, self.capture("epoch"), strict=False)
        for number, (state, before, now) in enumerate(groups):
            own = _sort_groups(state, before, now)
            counts = ([len(group) for group in one] for one in (before, now))
            problems += [] if own else [_OTHER_GROUPS.format(number, *counts)]
            found.append(own or state)
        self.fit.report(problems)
        return [*found, *states[len(found) :]]


def _sort_groups(
    state: Mapping[str, Any], saved: list[list[str]], present: list[list[str]]
) -> dict[str, Any] | None:
    """Return the state of an optimizer with the groups and parameters in the order of this run.

    torch loads it by position, and a program that makes its groups from sets has another order in
    each run. It stays as it is if names do not tell, as of a module that has others now. None if
    the parameters are in other groups.

    Args:
        state: What ``Optimizer.state_dict`` returned.
        saved: The names in each group then.
        present: Those now.
    """
    names = [[name for group in groups for name in group] for groups in (saved, present)]
    if sorted(names[0]) != sorted(names[1]) or len({*names[0]}) < len(names[0]):
        return {**state}
    # The order within a group may differ, too, so a group is known by its members.
    places = {frozenset(group): number for number, group in enumerate(saved)}
    sorted_groups = []
    for group in present:
        number = places.get(frozenset(group))
        if number is None:
            return None
        entry = state["param_groups"][number]
        keys = dict(zip(saved[number], entry["params"], strict=True))
        sorted_groups.append({**entry, "params": [keys[name] for name in group]})
    return {**state, "param_groups": sorted_groups}


class Schedulers(Part):
    """The names of schedulers, and of the callbacks that have put new ones there.

    These have put it in the place of another when an epoch started, and Lightning does not call
    their hook again for a partly trained epoch.
    """

    name, form, restored = "schedulers", dict[str, list[str]], ("started",)
    _first: tuple[object, ...] = ()

    def begin(self) -> None:
        self._first = (*list_schedulers(self.trainer),)

    def capture(self, _phase: Phase) -> dict[str, list[str]]:
        schedulers = list_schedulers(self.trainer)
        new = {id(own) for own in schedulers if own not in self._first}
        if not self.fit.has_begun or not new:
            return {}
        starters = [
            name
            for name, callback in name_callbacks(self.trainer.callbacks).items()
            if any(id(own) in new for _, own in search({name: callback}, depth=2))
        ]
        return {"starters": starters, "schedulers": [type(own).__name__ for own in schedulers]}

    def restore(self, state: dict[str, list[str]], _moment: Moment) -> None:
        trainer = self.trainer
        within = not self.fit.was_saved_between_epochs
        # StochasticWeightAveraging does not put its scheduler there in the epoch that only reads
        # statistics, although the fit has it there.
        earlier = lightning_private.skips_backward(trainer) and not within
        if within or earlier:
            groups = [group for own in trainer.optimizers for group in own.param_groups]
            # The optimizer's state has been loaded already, with the learning rate of the middle of
            # an epoch.
            rates = [group["lr"] for group in groups]
            progress = trainer.fit_loop.epoch_progress.current
            progress.completed -= earlier
            for name, callback in name_callbacks(trainer.callbacks).items():
                if name in state.get("starters", ()):
                    callback.on_train_epoch_start(trainer, trainer.lightning_module)
            progress.completed += earlier
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate  # which a new schedule sets
        # Their classes are enough: Lightning loads the states of schedulers by position.
        names = [type(own).__name__ for own in list_schedulers(trainer)]
        saved = state.get("schedulers", names)
        if saved != names:
            texts = [", ".join(part) or "none" for part in (saved, names)]
            self.fit.report([_OTHER_SCHEDULERS.format(*texts)])
