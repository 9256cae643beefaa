"""The gradients that a checkpoint holds: those to which a backward pass after the save adds.

Lightning zeroes gradients before the first backward pass of a step. A module that optimizes
manually, or overrides ``optimizer_zero_grad``, may keep them. Saving them with every checkpoint
would make it larger by the model on each rank. So gradients with which an optimizer has just
stepped are left out, because programs zero them next. If a resumed run adds to one, it is refused.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lightning_d9m.lightning import lightning_private
from lightning_d9m.lightning.logical_ranks.steps import get_logical_steps
from lightning_d9m.lightning.packages import is_of_program

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torch import Tensor
    from torch.nn import Parameter
    from torch.optim import Optimizer


def mark_used_gradients(trainer: "Trainer", optimizer: "Optimizer") -> None:
    """Mark the gradients with which a module that optimizes manually steps."""
    if trainer.lightning_module.automatic_optimization:
        return
    for parameter in _list_parameters(optimizer):
        gradient: Any = parameter.grad
        if gradient is not None:
            gradient.d9m_used = gradient._version  # noqa: SLF001 - torch has no other


def capture_gradients(trainer: "Trainer") -> dict[str, Any]:
    """Return gradients by the names of their parameters; None for one that a step has used."""
    module = trainer.lightning_module
    manual = not module.automatic_optimization
    accumulates = not manual and lightning_private.accumulates_gradients(trainer)
    if not (manual or accumulates or is_of_program(module.optimizer_zero_grad)):
        return {}
    if (logical := get_logical_steps(trainer)) is not None:
        return logical.kept.capture()
    found: dict[str, Any] = {n: p for n, p in module.named_parameters() if p.grad is not None}
    if not manual and not accumulates:
        stepped = {id(part) for each in trainer.optimizers for part in _list_parameters(each)}
        return {name: None for name, parameter in found.items() if id(parameter) in stepped}
    return {
        name: None
        if manual and _is_used(parameter)
        else parameter.grad.detach().to("cpu", copy=True)
        for name, parameter in found.items()
    }


def restore_gradients(
    trainer: "Trainer", gradients: Mapping[str, Any], report: Callable[[str], None]
) -> None:
    """Restore gradients; before a backward pass adds to one that was left out, report it once."""
    if not gradients:
        return
    if (logical := get_logical_steps(trainer)) is not None:
        logical.kept.restore(gradients, logical.block)
        return
    reported: list[str] = []

    def report_first(problem: str) -> None:
        if not reported:
            reported.append(problem)
            report(problem)

    for name, parameter in trainer.lightning_module.named_parameters():
        kept = gradients.get(name)
        parameter.grad = None if kept is None else torch.empty_like(parameter).copy_(kept)
        if kept is None and name in gradients and parameter.requires_grad:
            _watch(parameter, partial(report_first, _describe_addition(name)))


def _is_used(parameter: "Parameter") -> bool:
    gradient: Any = parameter.grad
    return bool(getattr(gradient, "d9m_used", None) == gradient._version)  # noqa: SLF001 - as above


def _list_parameters(optimizer: "Optimizer") -> Iterator["Parameter"]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _watch(parameter: "Parameter", report: Callable[[], None]) -> None:
    """Report a problem if the next backward pass adds to a gradient that nothing has zeroed."""
    # NaN, because in-place operations other than zero_() leave it in place.
    stand_in = torch.full_like(parameter, torch.nan)
    marked: Any = stand_in
    marked.d9m_used = marked._version  # noqa: SLF001 - as above; a checkpoint leaves it out too
    parameter.grad = stand_in

    def check(_: "Tensor") -> None:  # called before the gradient is added
        handle.remove()
        if parameter.grad is stand_in and bool(stand_in.isnan().any()):
            stand_in.zero_()
            report()

    handle = parameter.register_hook(check)


def _describe_addition(name: str) -> str:
    return (
        f"The program adds to the gradient of {name}, with which it stepped before the checkpoint "
        "was saved, and which the checkpoint lacks. Call zero_grad() between a step and the next "
        "backward pass."
    )
