"""The schema of records: what was written is read, and nothing else is."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_d9m.ledger.format.records import (
    RECORD_TYPES,
    End,
    FieldError,
    Header,
    RankDrift,
    Resume,
    RunFacts,
    decode_record,
    encode_record,
    parse_record,
)

names = st.text(st.characters(codec="utf-8"), max_size=20)
scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | names
scalars |= st.floats(allow_nan=False, allow_infinity=False)
digests = st.binary(min_size=16, max_size=16).map(bytes.hex)
counts = st.integers(0, 2**63 - 1)
hex_floats = st.floats().map(float.hex)
drifts = st.fixed_dictionaries(
    {"moment": names, "epoch": counts, "step": counts, "rank": st.integers(0, 65_535)}
    | {"group": names, "name": names}
)
# What each field of a record may be, where its name does not say it.
VALUES = {
    "schema": st.integers(1, 2),
    "rank": st.just(0),
    "world_size": st.integers(1, 65_536),
    "settings": st.dictionaries(names, scalars, max_size=3),
    "stack": st.dictionaries(names, scalars, max_size=3),
    "program": st.dictionaries(names, scalars, max_size=3),
    "trainer": st.dictionaries(names, scalars, max_size=3),
    "train": st.lists(
        st.fixed_dictionaries(dict.fromkeys(("samples", "batch_size", "batches"), counts)),
        max_size=3,
    ),
    "totals": st.dictionaries(names, digests, max_size=3),
    "groups": st.dictionaries(names, st.dictionaries(names, digests, max_size=3), max_size=2),
    "loss": st.none() | hex_floats,
    "scalars": st.dictionaries(names, hex_floats, max_size=3),
    "sketches": st.dictionaries(names, st.just("0123456789abcdef" * 8), max_size=2),
    "status": st.sampled_from(["finished", "failed"]),
    "error": st.none() | names,
    "problem": st.none() | names,
    "drift": st.none() | drifts,
    "id": st.integers(0, 65_535),
    "outputs": digests,
    "place": st.tuples(names, names, counts),
    "expected": st.none() | digests,
    "actual": st.none() | digests,
    "places": st.lists(st.tuples(names, names, counts), min_size=1, max_size=3, unique=True),
    "digests": st.binary(min_size=16, max_size=48),
    "parent_check": st.just("") | st.binary(min_size=8, max_size=8).map(bytes.hex),
    "inexact": st.lists(names, max_size=2),
    **dict.fromkeys(("moment", "name", "model", "package", "created", "parent"), names),
}


def draw_fields(kind):
    """Return a strategy for the fields of a record of a kind."""
    entry = RECORD_TYPES[kind]
    values = {name: VALUES.get(name, counts) for name in entry.__struct_fields__}
    return st.fixed_dictionaries({"kind": st.just(kind), **values})


records = st.sampled_from(sorted(RECORD_TYPES)).flatmap(draw_fields)


def to_json(fields):
    """Return JSON text that need not be of a record."""
    return json.dumps(fields, separators=(",", ":")).encode()


@settings(max_examples=100, deadline=None)
@given(fields=records)
def test_any_record_comes_back_as_it_was(fields):
    """Names may be any text."""
    record = parse_record(fields)
    assert decode_record(encode_record(record)) == record
    assert parse_record(record.as_record()) == record
    for name in record.__struct_fields__:
        read = record.as_record().get(name, getattr(record, name))
        one, other = (json.dumps(own, default=repr, sort_keys=True) for own in (read, fields[name]))
        assert one == other


@settings(max_examples=100, deadline=None)
@given(fields=records, name=names, value=scalars | st.just({}) | st.just([{}]), data=st.data())
def test_a_changed_text_says_its_change_or_is_refused(fields, name, value, data):
    fields = parse_record(fields).as_record()
    name = data.draw(st.sampled_from(sorted(fields)) | st.just(name))
    changed = {**fields, name: value}
    try:
        read = decode_record(to_json(changed))
    except (FieldError, TypeError):  # bytes
        return
    again = read.as_record().get(name, getattr(read, name))
    assert to_json(again) == to_json(value)


@given(st.from_regex(r"\A-?(?:0x[01]\.[0-9a-f]{1,14}p[+-][0-9]{1,4}|inf|nan)\Z"))
def test_other_texts_of_floats_are_refused(text):
    """Two texts of one number would differ although its bits are equal."""
    record = {"kind": "digests", "moment": "", "epoch": 0, "step": 0, "totals": {}, "groups": {}}
    try:
        decode_record(to_json(record | {"loss": text}))
    except FieldError:
        return
    assert float.fromhex(text).hex() == text


EXAMPLES = {
    "header": {
        "package": "0",
        "rank": 0,
        "world_size": 1,
        "fit": 0,
        "seed": 0,
        "created": "",
        "settings": {},
        "stack": {},
    },
    "run": {"model": "m", "parameters": 1, "train": []},
    "digests": {"moment": "epoch", "epoch": 0, "step": 0, "totals": {}, "groups": {}},
    "end": {"status": "finished"},
    "evaluation": {"name": "test", "epoch": 0, "step": 0, "batches": 1, "outputs": "0" * 32},
    "replay": {
        "epoch": 0,
        "step": 0,
        "batch": 0,
        "place": ["output", "a", 0],
        "expected": None,
        "actual": None,
        "count": 1,
        "total": 2,
    },
    "layout": {"id": 0, "places": [["loss", "loss", 0]]},
    "probes": {"epoch": 0, "step": 0, "batch": 0, "layout": 0, "digests": "A" * 22 + "=="},
    "resume": {"parent": "", "parent_check": "", "epoch": 0, "step": 0, "batch": 0},
}


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("digests", {"epoch": -1}),
        ("digests", {"moment": "x" * 5000}),
        ("digests", {"totals": {"weights": "00"}}),
        ("digests", {"groups": {"g": {"n": "0" * 32 + "\n"}}}),
        ("digests", {"scalars": {"a": "1"}}),
        ("digests", {"sketches": {"w": "F" * 128}}),
        ("end", {"status": "fine"}),
        ("replay", {"actual": "F" * 32}),
        ("header", {"rank": 1}),
        ("layout", {"places": []}),
        ("layout", {"places": [["a", "b", 0]] * 2}),
        ("run", {"train": [{"samples": 1, "batch_size": 1, "batches": 1, "later": 1}]}),
        ("resume", {"parent_check": "0"}),
    ],
)
def test_a_value_that_is_not_allowed_is_refused(kind, change):
    """With the name of its field."""
    record = {"kind": kind} | EXAMPLES[kind]
    decode_record(to_json(record))
    (name,) = change
    with pytest.raises(FieldError) as caught:
        decode_record(to_json(record | change))
    assert name in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"kind":"run","x":NaN}', "field 'record' does not fit: "),
        (b'{"kind":"run","model":"\xff"}', "field 'record' does not fit: "),
        (b'{"kind":"later","x":1}', "field 'kind' does not fit: Invalid value 'later'"),
        (b'{"kind":"end","status":"finished","check":"0"}', "unknown field `check`"),
        (b'{"kind":"end","error":' + b"[" * 10**5 + b"]" * 10**5 + b"}", "field 'error' does not"),
        (b"[1]", "Expected `object`, got `array`"),
    ],
)
def test_a_body_that_is_no_record(body, message):
    with pytest.raises(FieldError, match=message):
        decode_record(body)


@pytest.mark.parametrize("value", [object(), {1, 2}, "\ud800"])
def test_a_value_that_is_no_json_is_not_written(value):
    facts = RunFacts(model="m", parameters=1, train=(), trainer={"a": value})
    with pytest.raises(FieldError, match=r"cannot be written as JSON|does not fit"):
        encode_record(facts)


def test_texts_and_numbers_of_subclasses_are_written_as_such():
    class Version(str):
        __slots__ = ()

    class Count(int):
        pass

    words = EXAMPLES["header"] | {"stack": {"torch": Version("2"), "threads": Count(3)}}
    assert decode_record(encode_record(Header(**words))).stack == {"torch": "2", "threads": 3}


def test_long_messages_are_cut():
    """An error's text may have any length."""
    end = End.failed(ValueError("x" * 10_000))
    assert len(end.error) == 4096
    assert decode_record(encode_record(end)) == end
    drift = RankDrift(moment="", epoch=0, step=0, rank=0, group="", name="x" * 5000)
    assert len(drift.name) == 4096
    resume = Resume(parent="", parent_check="", epoch=0, step=0, batch=0, inexact=("x" * 5000, "y"))
    assert [len(reason) for reason in resume.inexact] == [4096, 1]
