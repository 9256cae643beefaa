"""What a comparison collects for the report."""

from lightning_d9m.comparison.ledgers import compare_ledgers
from lightning_d9m.comparison.timeline import Timeline
from lightning_d9m.ledger.folder import read_ledger
from lightning_d9m.ledger.format.records import ProbeLayout, ProbesRecord


def probe(batch):
    """Return the record of a probe of one batch."""
    return ProbesRecord(epoch=0, step=batch, batch=batch, layout=0, digests=bytes(16)).as_record()


def probes(batches):
    """Return what adds the probes of so many batches to a run."""
    layout = ProbeLayout(0, (("output", "layer", 0),)).as_record()

    def edit(_, records):
        records[3:3] = [layout, *map(probe, range(batches))]

    return edit


def test_what_only_one_run_has_is_told_apart(runs):
    timeline = Timeline()
    ledgers = (runs.write(3, edit=probes(2)), runs.write(2, edit=probes(3)))
    compare_ledgers(*map(read_ledger, ledgers), watch=timeline.watch)
    alone = {step.first: step.alone for step in timeline.ranks[0].ordered()}
    # The runs end after different epochs, so each final state is alone, too.
    assert (alone[1], alone[2], alone[46], alone[69]) == (0, 1, 1, 2)


def test_the_steps_at_which_each_module_was_compared(runs):
    timeline = Timeline()
    ledger = read_ledger(runs.write(3, edit=probes(2)))
    compare_ledgers(ledger, ledger, watch=timeline.watch)
    steps = {
        path: {step.first for step in module.steps.ordered()}
        for path, module in timeline.modules.items()
    }
    assert steps["layer"] == {0, 1}
    assert steps["layers.0"] == {0, 23, 46, 69}
    assert not timeline.differs
