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
    cells, width = timeline.steps.rows[0], timeline.steps.width
    # The runs end after different epochs, so each final state is alone, too.
    alone = {column: cell[1] for column, cell in cells.items() if cell[1]}
    assert alone == {2 // width: 1, 46 // width: 1, 69 // width: 2}


def test_the_steps_at_which_each_module_was_compared(runs):
    timeline = Timeline()
    ledger = read_ledger(runs.write(3, edit=probes(2)))
    compare_ledgers(ledger, ledger, watch=timeline.watch)
    rows, width = timeline.steps.rows, timeline.steps.width
    assert rows["layer"].keys() == {0, 1 // width}
    assert rows["layers.0"].keys() == {step // width for step in (0, 23, 46, 69)}
    assert not timeline.firsts
