"""From the first place at which two runs disagree to what kind of cause it has.

Nothing here imports torch. What a batch starts from is probed before what it computes, so the
first place that differs is the one nearest to the cause; the kinds that are equal before it rule
the others out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_d9m.comparison.ledgers import Comparison, Divergence
from lightning_d9m.ledger.kinds import KINDS, ROOT

# Operations that draw: other outputs for equal inputs are other draws, not another arithmetic.
_DRAWING = (
    *("bernoulli", "dropout", "rand", "normal", "uniform", "multinomial", "poisson"),
    *("exponential", "geometric", "cauchy", "random", "rrelu"),
)


@dataclass(frozen=True)
class Cause:
    """What kind of cause a divergence has.

    Attributes:
        kind: ``"stack"``, ``"initial weights"``, ``"random numbers"``, ``"data"``,
            ``"optimizer settings"``, ``"optimizer state"``, ``"weights"``, ``"buffers"``,
            ``"gradients"``, ``"all-reduce"``, ``"op"``, ``"uninitialised memory"``,
            ``"value from outside torch"``, ``"module"``, ``"logged value"``,
            ``"after training"``, ``"rank drift"``, ``"length"``, ``"incomparable"`` or
            ``"unknown"``.
        text: One sentence: what differs, and what was equal before it.
        advice: What to do about it.
        narrows: Whether a narrower look, at modules or operations, can say more.
    """

    kind: str
    text: str
    advice: str
    narrows: bool = False


_CAUSES = {
    "stack": Cause(
        "stack",
        "The two runs saw different stacks.",
        "Make the fields that differ equal, and locate again.",
    ),
    "initial buffers": Cause(
        "buffers",
        "Buffers differ before the first step.",
        "Look at what writes to them before the training: the model's own code, a hook, or the "
        "validation that Lightning runs first.",
    ),
    "initial settings": Cause(
        "optimizer settings",
        "The optimizer's settings differ before the first step.",
        "Look at what configure_optimizers computes them from.",
    ),
    "initial weights": Cause(
        "initial weights",
        "The weights differ before the first step.",
        "Seed before the model is built: LIGHTNING_D9M=1 or lightning_d9m.enable() at the top of "
        "the program; weights from a private generator, numpy.random.default_rng() say, need a "
        "seed of their own; weights that are loaded come from another file.",
    ),
    "rng": Cause(
        "random numbers",
        "A generator stands elsewhere when the batch begins, so numbers were drawn that the other "
        "run did not draw.",
        "Look for draws whose number depends on the clock, on the network, or on another thread.",
    ),
    "batch": Cause(
        "data",
        "The batch differs, while the generators and the weights were equal.",
        "Look at the dataset: a private generator without a seed, os.urandom, the clock, the order "
        "of a set or of the files in a folder. `d9m scan` looks for these in the source.",
    ),
    "optimizer settings": Cause(
        "optimizer settings",
        "The optimizer's settings differ, while the gradients before were equal.",
        "Look at what sets the learning rate and the other settings: a schedule by the clock, say.",
    ),
    "optimizer": Cause(
        "optimizer state",
        "The optimizer's state differs, while the weights and the gradients before were equal.",
        "Look at the optimizer's own arithmetic, and at what else writes to its state.",
    ),
    "weight": Cause(
        "weights",
        "Weights differ, while the gradients before were equal, and so were the optimizer's "
        "settings.",
        "Something else wrote to the weights: another thread, a callback, clipping, or the "
        "optimizer's own step.",
    ),
    "buffer": Cause(
        "buffers",
        "Buffers differ, while everything that was recorded before is equal.",
        "Look at what writes to them: the training step itself, the validation, a callback, or "
        "another thread.",
    ),
    "gradient": Cause(
        "gradients",
        "Gradients differ when the optimizer uses them, and were equal when the backward pass had "
        "computed them.",
        "Look at what writes to gradients between the two: a hook, a callback, another thread. If "
        "nothing does, suspect the memory of that machine.",
    ),
    "all-reduce": Cause(
        "all-reduce",
        "Gradients differ after the ranks have exchanged them, and were equal before.",
        "With Horovod use the strategy 'horovod_d9m'; with NCCL keep NCCL_ALGO, and let no "
        "communication hook of your own reorder the sum.",
    ),
    "scalar": Cause(
        "logged value",
        "Only a logged value differs; what was computed is equal.",
        "Leave it out with ignored_metrics if it differs by nature, as measured times do.",
    ),
    "monitor": Cause(
        "module",
        "A monitored value differs, and nothing that was recorded before it.",
        "Look at the code between the last place that is equal and the monitor.",
    ),
    "draw": Cause(
        "random numbers",
        "An operation that draws gave other numbers for equal inputs, while the generators of "
        "Python, NumPy and torch were equal when the batch began.",
        "It draws from a generator of its own, or something drew within the batch: seed it.",
    ),
    "empty": Cause(
        "uninitialised memory",
        "An operation was given other inputs, though no operation had written them, and the runs "
        "agree when new memory is filled: it reads memory that nothing initialised.",
        "Write all of a tensor that torch.empty, empty_like or new_empty gives before you read it, "
        "or take torch.zeros.",
    ),
    "outside": Cause(
        "value from outside torch",
        "An operation was given other inputs, though no operation had written them, and filled "
        "memory changes nothing.",
        "Look at what that line takes from NumPy, the clock, a file, another thread, or a kernel "
        "that torch does not see.",
    ),
    "op": Cause(
        "op",
        "An operation gave other outputs, and everything recorded before it is equal.",
        "",
        narrows=True,
    ),
    "module": Cause(
        "module",
        "What a module computes differs, and everything recorded before it is equal.",
        "",
        narrows=True,
    ),
    "after training": Cause(
        "after training",
        "All epochs agree, and the final state differs.",
        "Look at what rewrites the weights when the training ends.",
    ),
    "given": Cause(
        "module",
        "What is given to a module differs, and everything recorded before it is equal.",
        "Look at what is done to it before: in training_step, or to the batch in a hook such as "
        "on_train_batch_start.",
        narrows=True,
    ),
    "length": Cause(
        "length",
        "One run goes on where the other ends, and all that both have recorded is equal.",
        "Look at what ends the training: a limit of time, or a callback that stops it.",
    ),
    "incomparable": Cause(
        "incomparable",
        "The two runs are not the same experiment.",
        "Make the fields that differ equal; a seed or a size that changes by itself is the cause.",
    ),
    "unknown": Cause("unknown", "The runs differ.", "", narrows=True),
}
_RANK_TEXTS = {
    "weight": "When the batch begins, the ranks hold different weights. They were equal when the "
    "batch before it began.",
    "optimizer": "When the batch begins, the ranks hold different optimizer state. It was equal "
    "when the batch before it began, and so were the weights.",
    "gradient": "The optimizer uses different gradients on the ranks, although the ranks have "
    "exchanged them. The weights were equal when the batch began.",
}
_RANK_ADVICE = (
    "Look for what only one rank does: code behind a test of the rank, a parameter that the "
    "strategy does not synchronize, a collective that one rank skips. If there is nothing, suspect "
    "the device or the memory of that rank."
)
UNINITIALISED, OUTSIDE = _CAUSES["empty"], _CAUSES["outside"]
# By the group of the digests that the training starts from.
_INITIAL = {
    "weights": "initial weights",
    "buffers": "initial buffers",
    "optimizers": "initial settings",
    "schedulers": "initial settings",
}
# The kind of place of a group of the digests that an epoch ends with.
_KINDS = {"weights": "weight", "buffers": "buffer", "optimizers": "optimizer"}
_KINDS |= {"schedulers": "optimizer settings", "loss": "scalar", "scalars": "scalar"}
# What a batch starts from.
STATE = frozenset({"rng", "weight", "buffer", "optimizer"})
_INSIDE = ("input", "output", "loss", "grad_output", "local_gradient")


def first_divergences(comparison: Comparison) -> tuple[Divergence, ...]:
    """Return the divergences of the ranks that diverge first.

    Several when they do so at the same moment, in what they compute at the same place.
    """
    found = [rank.divergence for rank in comparison.ranks if rank.divergence is not None]
    first = min((entry.when for entry in found), default=None)
    return tuple(entry for entry in found if entry.when == first)


def find_cause(comparison: Comparison, *, batches_seen: bool = False) -> Cause:
    """Say what kind of cause the first divergence of a comparison has.

    Args:
        comparison: How two runs compare.
        batches_seen: Whether probes saw all batches of the epoch that diverges first. If its end
            differs all the same, then what came after its last batch's gradients did.
    """
    if comparison.refusals:
        return _CAUSES["incomparable"]
    if comparison.stack:
        return _CAUSES["stack"]
    found = first_divergences(comparison)
    if not found:
        alone = [
            side for rank in comparison.ranks for side in (rank.only_expected, rank.only_actual)
        ]
        longer = any(side.count for side in alone)
        return _CAUSES["length" if longer else "unknown"]
    return _cause_of(found, len(comparison.ranks), batches_seen=batches_seen)


def find_rank_cause(drift: Divergence, *, steps_seen: bool) -> Cause:
    """Return the cause of ranks that drift apart within one run.

    Args:
        drift: The first place at which a rank differs from the others.
        steps_seen: Whether the weights at each step of that epoch were compared.
    """
    if drift.moment == "initial":
        text = "The ranks hold different weights before the first step."
    elif drift.moment == "batch":
        text = _RANK_TEXTS[drift.kind]
    elif steps_seen:
        text = (
            "At the end of the epoch the ranks hold different weights. They were equal when its "
            "last batch began."
        )
    else:
        text = "The ranks hold different weights."
    return Cause("rank drift", text, _RANK_ADVICE)


def _cause_of(found: Sequence[Divergence], ranks: int, *, batches_seen: bool) -> Cause:
    first = found[0]
    if first.moment == "initial":
        return _CAUSES[_INITIAL.get(first.kind, "unknown")]
    if first.moment == "final":
        return _CAUSES["after training"]
    if first.moment == "epoch" and batches_seen:
        kind = _KINDS.get(first.kind, "unknown")
        return _CAUSES["optimizer settings" if _is_setting(kind, first.name) else kind]
    if first.moment != "batch":
        return _CAUSES["unknown"]
    return _CAUSES[_rule(first, found, everywhere=len(found) == ranks > 1)]


def _rule(first: Divergence, found: Sequence[Divergence], *, everywhere: bool) -> str:
    if first.kind == "weight" and first.step == 0 and first.batch == 0:
        return "initial weights"
    state = first.kind in ("weight", "buffer", "optimizer")
    if state and any(_is_setting(place.kind, place.name) for f in found for place in f.places):
        return "optimizer settings"
    if first.kind == "op":
        op = first.name.rpartition("::")[2]
        return "draw" if any(word in op for word in _DRAWING) else "op"
    if first.kind in _INSIDE:
        return "given" if first.kind == "input" else "module"
    if first.kind == "gradient":
        return "all-reduce" if everywhere else "gradient"
    return first.kind if first.kind in _CAUSES else "unknown"


def _is_setting(kind: str, name: str) -> bool:
    """Whether a place is a setting of a parameter group, such as ``0.group.0:lr``."""
    return kind == "optimizer" and name.partition(".")[2].startswith("group.")


def kind_of_place(found: Divergence) -> str | None:
    """Return the kind of the probes that meet what differs; None where none has values to show."""
    kind = found.kind if found.moment == "batch" else _KINDS.get(found.kind)
    return kind if kind in KINDS and kind != "rng" else None


def name_module(found: Divergence) -> str:
    """Return the name of the module whose operations may have made a place differ.

    What goes into a module was computed by the module around it, and so was the gradient of what
    comes out.

    >>> from types import SimpleNamespace as Place
    >>> name_module(Place(kind="output", name="encoder.0:hidden.1"))
    'encoder.0'
    >>> name_module(Place(kind="input", name="encoder.0"))
    'encoder'
    >>> name_module(Place(kind="local_gradient", name="encoder.0.weight"))
    'encoder.0'
    >>> name_module(Place(kind="op", name="encoder.0::aten.max.dim:1"))
    'encoder.0'
    """
    name = found.name.partition("::")[0].partition(":")[0]
    if found.kind in ("input", "grad_output", "local_gradient"):
        name = name.rpartition(".")[0]
    elif found.kind not in ("op", "output"):
        name = ""
    return name or ROOT
