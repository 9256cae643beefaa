"""The kind of cause of a divergence, from the first place at which two runs differ.

The state that a batch starts from is probed before its computations, so the first place that
differs is the nearest to the cause, and the kinds that are equal before it rule out other causes.
This module imports torch only to look up an operation.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_d9m.engine.ledger.differences import KIND_OF_GROUP, Divergence
from lightning_d9m.engine.ledger.kinds import EXCEPTION, PROBE_KINDS, ROOT, SAVED, STATE, STEP
from lightning_d9m.text import read_stanzas
from lightning_d9m.tools.comparison.ledgers import Comparison


@dataclass(frozen=True)
class Cause:
    """A kind of cause.

    Attributes:
        kind: One of those in ``causes.txt``.
        text: One sentence on what differs and what was equal before.
        advice: Instructions for the user.
        narrows: Whether a narrower look, at modules or operations, can add to it.
    """

    kind: str
    text: str
    advice: str
    narrows: bool = False


_STANZAS = read_stanzas(Path(__file__).with_name("causes.txt"))
_FIELDS = [{name: value for name, [value] in stanza.items()} for stanza in _STANZAS]
_CAUSES = {
    own["cause"]: Cause(
        own.get("kind", own["cause"]), own["differs"], own.get("advice", ""), "narrows" in own
    )
    for own in _FIELDS
}
UNINITIALIZED, OUTSIDE, OUTSIDE_NUMBER = (_CAUSES[name] for name in ("empty", "outside", "number"))
# Kind of what differs by the group of digests at the end of an epoch.
_KINDS = {
    **KIND_OF_GROUP,
    **dict.fromkeys(("loss", "scalars"), "scalar"),
    "schedulers": "optimizer settings",
    "generators": "rng",
}
# The moments of a state after its step. A fit that an exception ended has the state there in place
# of that of the epoch's end.
AFTER_STEP = ("epoch", EXCEPTION, STEP)
# What a missing seed changes first: what is drawn before the first step, or in a batch.
_SEEDED = ("initial weights", "initial gradients", "rng", "batch")
# What a logged value can change through a callback, such as EarlyStopping or ReduceLROnPlateau.
_STEERED = ("length", "optimizer settings", "logged value", "unknown")
# The kinds of probes that a cause takes for equal, by the kind of the first place that differs.
_BEGUN = frozenset({"rng", "weight", "buffer", "batch"})
_NEEDS = {
    **dict.fromkeys(("weight", "buffer", "optimizer"), frozenset({"gradient"})),
    "batch": frozenset({"rng", "weight"}),
    **dict.fromkeys(("input", "loss", "grad_output", "local_gradient"), _BEGUN),
    **dict.fromkeys(("output", "op"), _BEGUN | {"input"}),
    "gradient": frozenset({"local_gradient"}),
}
# Places of modules: what differs there is computed within the step.
_INSIDE = ("input", "output", "loss", "grad_output", "local_gradient")


def earliest_divergences(comparison: Comparison) -> tuple[Divergence, ...]:
    """Return the divergences of the ranks that diverge first, all at the same place.

    Of operations, those of the module in which the values of modules differ first count: the
    program may compute more in the step that differs, and is not the cause.
    """
    found = comparison.divergences
    # Values of modules come first, operations second: a module whose input or output differs is
    # part of the computation, while an operation may compute what nothing reads.
    modules = sorted(_select_ops(found, None), key=lambda entry: entry.when)
    if modules and modules[0].moment == "batch":
        own = _select_ops(found, name_module(modules[0]))
        found = sorted(own, key=lambda entry: entry.when)
    return tuple(entry for entry in found if entry.when == found[0].when)


def _select_ops(found: Iterable[Divergence], module: str | None) -> Iterator[Divergence]:
    """Yield what is left of divergences with the operations of a module; None for no operations."""
    for own in found:
        places = [
            place
            for place in own.places
            if place.kind != "op"
            or module == ROOT
            or (module and f"{place.name.partition('::')[0]}.".startswith(f"{module}."))
        ]
        if places:
            yield replace(own, places=places)


def find_cause(comparison: Comparison, *, batches_seen: bool = False) -> Cause:
    """Return the cause of the first divergence of a comparison.

    ``batches_seen`` says whether probes saw all batches of the epoch that diverges first. If only
    its end differs, the cause comes after the last batch's gradients.
    """
    # A seed that the program draws itself makes the runs incomparable; the call that draws it says
    # more than that.
    if comparison.refusals:
        by_seed = any(entry.field == "seed" for entry in comparison.refusals)
        return (by_seed and _find_seeding(comparison)) or _CAUSES["incomparable"]
    if comparison.stack and not comparison.portable:
        return _CAUSES["stack"]
    return _find_cause(comparison, batches_seen=batches_seen)


def advise(comparison: Comparison) -> str:
    """Return what the first difference alone shows, and advice; empty unless it allows any."""
    if not comparison.divergences:
        return ""
    cause = _find_cause(comparison, batches_seen=False)
    # The other kinds need probes, or a look at modules and operations, before advice is worth
    # reading.
    alone = cause.kind in ("seed", "initial weights", "buffers", "logged value", "length")
    return f"{cause.text} {cause.advice}" if alone else ""


def _find_cause(comparison: Comparison, *, batches_seen: bool) -> Cause:
    found = earliest_divergences(comparison)
    if not found:
        longer = comparison.one_is_longer
        cause = _CAUSES["length" if longer else "unknown"]
        return _add_text(cause, _describe_ends(comparison) if longer else "")
    if found[0].is_end:
        name = "end" if "failed" in (found[0].expected, found[0].actual) else "length"
    else:
        name = _cause_of(found, len(comparison.ranks), batches_seen=batches_seen)
    if name == "weight" and comparison.begins_late:
        name = "forward"
    # Whether a logged value matters depends on what differs besides it.
    if name == "scalar":
        name = {"logged values": "scalar", "evaluations": "evaluation"}.get(
            comparison.extent, "steering"
        )
    return _refine(name, comparison, found[0], batches_seen=batches_seen)


def _refine(name: str, comparison: Comparison, first: Divergence, *, batches_seen: bool) -> Cause:
    """Return a cause with what else the comparison shows of it."""
    if (logged := comparison.logged) is not None:
        # The value came first and can reach these through a callback, so it is the cause that is
        # named.
        if _CAUSES[name].kind in _STEERED:
            return _CAUSES["steering"]
        which = "an evaluation" if logged.kind == "evaluation" else f"the logged {logged.name}"
        said = f"Before it, {which} differs in {logged.where}."
        return _add_text(_CAUSES[name], said)
    if name in _SEEDED and (seeding := _find_seeding(comparison)) is not None:
        return seeding
    if name == "steps":
        one, other = first.steps
        ends = _describe_ends(comparison)
        equal = "; everything recorded before is equal" if batches_seen else ""
        said = f"One run ends at step {one}, the other at step {other}{equal}. {ends}".rstrip()
        return replace(_CAUSES[name], text=said, narrows=not batches_seen)
    unseen = sorted(_NEEDS.get(first.kind, frozenset()) - comparison.probes)
    # Nothing was computed before the state of the first batch.
    is_begun = first.step == 0 and first.batch == 0 and first.kind in STATE
    said = _describe_ends(comparison) if first.is_end else ""
    if first.moment == "batch" and unseen and not is_begun:
        said = f"Not recorded, so not ruled out: a difference of {', '.join(unseen)} before it."
    return _add_text(_CAUSES[name], said)


def _find_seeding(comparison: Comparison) -> Cause | None:
    """Return the cause of runs that a program seeds differently; None if it does not."""
    calls = [text.split("; ") for text in comparison.seeded]
    # The last calls of each run: one may have made more of them.
    pairs = zip(*calls, strict=False)
    found = next(((one, other) for one, other in pairs if one != other), None)
    return found and _add_text(_CAUSES["seed"], f"Run 1: {found[0]}. The other: {found[1]}.")


def _add_text(cause: Cause, sentence: str) -> Cause:
    return replace(cause, text=f"{cause.text} {sentence}".rstrip())


def _describe_ends(comparison: Comparison) -> str:
    """Say what ended the runs, as far as their ledgers tell."""
    rank = comparison.ranks[0]
    sides = (("the reference", rank.expected), ("this run", rank.actual))
    said = [f"{name} was ended by {side.reason}" for name, side in sides if side.reason]
    return f"{said[0][:1].upper()}{'; '.join(said)[1:]}." if said else ""


def find_rank_cause(drift: Divergence) -> Cause:
    """Return the cause of ranks that drift apart within one run, from the first place."""
    text = _CAUSES.get(f"ranks {drift.moment}", _CAUSES["ranks"]).text
    kind = KIND_OF_GROUP.get(drift.kind, drift.kind)
    state = _CAUSES[kind].kind if kind in _CAUSES else kind
    return replace(_CAUSES["ranks"], text=text.format(state))


def _cause_of(  # noqa: C901, PLR0911 - one case for each kind of place
    found: Sequence[Divergence], ranks: int, *, batches_seen: bool
) -> str:
    first = found[0]
    if first.moment == "initial":
        name = f"initial {first.kind.replace('schedulers', 'optimizers')}"
        return name if name in _CAUSES else "unknown"
    if first.moment == "final" or first.kind == SAVED:
        return "after training" if first.moment == "final" else SAVED
    ends_epoch = first.moment in AFTER_STEP
    if ends_epoch and "step" in first.by_kind:
        return "steps"
    if ends_epoch and batches_seen:
        kind = _KINDS.get(first.kind, "unknown")
        return "optimizer settings" if _is_setting(kind, first.name) else kind
    if ends_epoch and {place.kind for place in first.places} <= {"scalars"}:
        return "scalar"
    if first.moment != "batch":
        return "unknown"
    # The weights with which the first batch begins are the initial ones.
    if first.kind == "weight" and first.step == 0 and first.batch == 0:
        return "initial weights"
    if _is_setting(first.kind, first.name):
        return "optimizer settings"
    if first.kind == "weight" and any(
        _is_setting(place.kind, place.name) for entry in found for place in entry.places
    ):
        return "weight and setting"
    if first.kind == "op":
        return "draw" if _draws(first.name.rpartition("::")[2]) else "op"
    # Generators are probed when a batch begins and when its loss is computed: they differ only in
    # the second probe, or the first kind would be theirs.
    if first.kind in _INSIDE and "rng" in first.by_kind:
        return "drawn"
    if first.kind in _INSIDE:
        return "given" if first.kind == "input" else "module"
    # What only one rank computes differs on that rank first; a sum that differs reaches all ranks
    # in the same place.
    everywhere = first.kind == "gradient" and len(found) == ranks > 1
    name = "all-reduce" if everywhere else first.kind
    return name if name in _CAUSES else "unknown"


def _draws(op: str) -> bool:
    """Return whether torch says that an operation draws from a generator: it is tagged so.

    An operation that this process does not know, such as one of an extension, is not.
    """
    import torch  # here, because `d9m compare` must not load it

    # Such as aten.mm.default:1, with the number of an output.
    namespace, _, name = op.partition(":")[0].partition(".")
    packet, _, overload = name.partition(".")
    found = getattr(getattr(torch.ops, namespace), packet, None)
    tags = getattr(getattr(found, overload or "default", None), "tags", ())
    return torch.Tag.nondeterministic_seeded in tags


def _is_setting(kind: str, name: str) -> bool:
    """Return whether a place is a setting of a parameter group, such as ``0.group.0:lr``."""
    return kind == "optimizer" and name.partition(".")[2].startswith("group.")


def kind_of_place(found: Divergence) -> str | None:
    """Return the kind of probe that can save the values that differ; None if there is none."""
    kind = found.kind if found.moment == "batch" else _KINDS.get(found.kind)
    return kind if kind in PROBE_KINDS and kind != "rng" else None


def name_module(found: Divergence) -> str:
    """Return the name of the module whose operations compute the value at a place.

    The enclosing module computes a module's inputs and the gradients of its outputs.

    >>> from types import SimpleNamespace as Place
    >>> name_module(Place(kind="output", name="encoder.0:hidden.1"))
    'encoder.0'
    >>> name_module(Place(kind="input", name="encoder.0"))
    'encoder'
    >>> name_module(Place(kind="local_gradient", name="encoder.0.weight"))
    'encoder.0'
    >>> name_module(Place(kind="loss", name="loss")) == ROOT
    True
    """
    module = found.name.partition(":")[0].removeprefix(ROOT)
    if found.kind in ("input", "grad_output", "local_gradient"):
        module = module.rpartition(".")[0]
    elif found.kind != "output":
        return ROOT
    return module or ROOT
