"""Records of unusual shapes: time and memory are in proportion to their bytes."""

import gc
import json
import sys
import tracemalloc

import pytest

from lightning_d9m.comparison.ledgers import compare_ledgers
from lightning_d9m.ledger.folder import read_ledger
from lightning_d9m.ledger.format.encoding import (
    MAX_DEPTH,
    decode_record,
    encode_record,
    estimate_memory,
)
from lightning_d9m.ledger.format.fields import FieldError

SHAPES = {
    "empty objects": [{}] * 100_000,
    "empty lists": [[]] * 100_000,
    "objects": [{"a": 1}] * 60_000,
    "nested": [[[{}]]] * 40_000,
    "numbers": [1.5] * 200_000,
    "texts": ["ab"] * 100_000,
}


def body_of(value):
    return encode_record({"kind": "later", "x": value})


@pytest.mark.parametrize("shape", SHAPES)
def test_no_line_of_python_runs_for_each_value_of_a_record(shape):
    """A record takes little more time than its JSON."""
    body = body_of(SHAPES[shape])
    events = 0

    def count(*_):
        nonlocal events
        events += 1

    gc.disable()  # others' callbacks of it would be counted
    sys.setprofile(count)
    try:
        decode_record(body)
    finally:
        sys.setprofile(None)
        gc.enable()
    assert 0 < events < len(SHAPES[shape]) / 4


@pytest.mark.parametrize("shape", SHAPES)
def test_the_memory_of_a_parsed_record_is_estimated(shape):
    """Records that wait for their counterparts are bounded by this estimate."""
    body = body_of(SHAPES[shape])
    tracemalloc.start()
    try:
        record = decode_record(body)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert record.fields["x"] == SHAPES[shape]
    assert taken < 3 * estimate_memory(body)


def nested(depth):
    value = '{[\\"' * 20  # brackets within a text do not nest
    for level in range(depth):
        value = {"a": value} if level % 2 else [value]
    return value


def test_nesting_up_to_the_bound():
    assert decode_record(body_of(nested(MAX_DEPTH))).fields["x"] == nested(MAX_DEPTH)
    with pytest.raises(FieldError, match="'x' nests deeper than 16 levels"):
        body_of(nested(MAX_DEPTH + 1))
    text = json.dumps({"kind": "later", "x": nested(MAX_DEPTH + 1)}).encode()
    with pytest.raises(FieldError, match="'x' nests deeper than 16 levels"):
        decode_record(text)


def test_a_name_that_occurs_twice_within_empty_ones():
    with pytest.raises(FieldError, match="'a' occurs twice"):
        decode_record(b'{"kind":"later","x":[{},{},[{"a":1,"a":2}]]}')


def test_an_unknown_field_of_a_dataloader_is_kept_and_compared(runs):
    def workers(number):
        return lambda _, records: records[1]["train"][0].update(workers=number)

    one, same, other = (read_ledger(runs.write(edit=workers(number))) for number in (2, 2, 3))
    facts = next(iter(one.records(0)))
    assert facts.as_record()["train"][0]["workers"] == 2
    assert compare_ledgers(one, same).equal
    comparison = compare_ledgers(one, other)
    assert not comparison.equal
    assert [refusal.field for refusal in comparison.refusals] == ["train.0.workers"]
