"""Narrow down the first place at which the ranks of a run differ from each other."""

from lightning_d9m.comparison.causes import find_rank_cause, kind_of_place
from lightning_d9m.comparison.rank_drift import find_rank_drift, reference_rank
from lightning_d9m.comparison.result import Divergence
from lightning_d9m.launch.run_pair import Runner, RunPair
from lightning_d9m.ledger.stack import SHARDED_PARAMETERS
from lightning_d9m.locate.result import SearchResult, describe_place

_PROBES = "weight,buffer,optimizer,gradient"


def locate_rank_drift(runner: Runner, pair: RunPair, found: SearchResult) -> None:
    """Find the step, rank, tensor and index of a drift that every run has; fill ``found``."""
    drift = pair.rank_drift
    found.pair, found.ranks = pair, len(pair.expected.files)
    _report(found, "whole run", drift, steps_seen=False)
    # Probes hold the digests of shards, which are not compared across ranks.
    divided = pair.expected.header.stack.get(SHARDED_PARAMETERS)
    if drift[0].moment == "initial" or divided:
        _measure(runner, pair, found, drift[0].step)
        return
    low, high = pair.steps_of_epoch(drift[0].epoch)
    steps = f"{low}:{max(high, low + 1)}"
    run = runner.run("steps of the epoch", probes=_PROBES, probe_steps=steps)
    narrowed = find_rank_drift(run.fits[pair.fit]) if pair.fit in run.fits else ()
    if not narrowed or narrowed[0].epoch > drift[0].epoch:
        found.looks.append("steps of the epoch: the drift did not occur again")
        return
    _report(found, "steps of the epoch", narrowed, steps_seen=True)
    _measure(runner, pair, found, low)


def _report(
    found: SearchResult, stage: str, drift: tuple[Divergence, ...], *, steps_seen: bool
) -> None:
    found.divergences = drift
    found.reference_rank = reference_rank(drift[0])
    found.cause = find_rank_cause(drift[0], steps_seen=steps_seen)
    found.looks.append(f"{stage}: {describe_place(drift)}")


def _measure(runner: Runner, pair: RunPair, found: SearchResult, low: int) -> None:
    """Save the values of the first place on all ranks, and measure how far they are apart."""
    from lightning_d9m.locate.op_evidence import measure_saved

    first = found.divergences[0]
    kind = kind_of_place(first)
    if kind is None:  # the state of a scheduler
        return
    # The step before shows that the ranks were still equal there.
    steps = f"{max(low, first.step - 1)}:{first.step + 1}"
    run = runner.run("values", dump=first.name, probes=_PROBES, probe_steps=steps)
    again = find_rank_drift(run.fits[pair.fit]) if pair.fit in run.fits else ()
    place = (first.rank, first.step, first.kind, first.name)
    if not again or (again[0].rank, again[0].step, again[0].kind, again[0].name) != place:
        found.looks.append("values: the drift did not occur again")
        return
    found.looks.append(f"values: {describe_place(again)}")
    found.magnitude = measure_saved(
        first, kind, [run.dump, run.dump], ranks=(reference_rank(first), first.rank)
    )
