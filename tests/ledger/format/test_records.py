"""The schema of records: what was written is read, and nothing else is."""

import json
import os
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_runs import make_digests, make_header, parse_record
from msgspec import inspect

from lightning_d9m.engine.ledger.format.records import (
    Checkpoint,
    Digests,
    End,
    Evaluation,
    FieldError,
    Header,
    ProbeLayout,
    RankDrift,
    Record,
    Resume,
    RunFacts,
    decode_record,
    encode_record,
)

# JSON's text of such a character, and that of its escape.
ESCAPED = r"\udce9", r"\\udce9"
names = st.text(st.characters(codec="utf-8"), max_size=20)
floats = st.floats(allow_nan=False, allow_infinity=False)


def draw(kind, field=""):
    """Return a strategy for the JSON values that the schema allows for a type of a field."""
    return STRATEGIES[type(kind)](kind, field)


def draw_text(kind, field):
    if kind.pattern:
        return st.from_regex(kind.pattern)
    if size := kind.min_length:
        return st.text("0123456789abcdef", min_size=size, max_size=size)
    return st.floats().map(float.hex) if field in {"loss", "scalars"} else names


def draw_whole(kind, _):
    low, high = (-(2**63) if kind.ge is None else kind.ge), kind.le or 2**63 - 1
    return st.integers(low, high)


def draw_list(kind, _):
    size = kind.min_length or 0
    return st.lists(draw(kind.item_type), min_size=size, max_size=3, unique_by=repr)


STRATEGIES = {
    inspect.Metadata: lambda kind, field: draw(kind.type, field),
    inspect.UnionType: lambda kind, field: st.one_of([draw(own, field) for own in kind.types]),
    inspect.NoneType: lambda *_: st.none(),
    inspect.LiteralType: lambda kind, _: st.sampled_from(kind.values),
    inspect.BoolType: lambda *_: st.booleans(),
    inspect.FloatType: lambda *_: floats,
    inspect.IntType: draw_whole,
    inspect.StrType: draw_text,
    inspect.BytesType: lambda *_: st.binary(min_size=16, max_size=48),
    inspect.DictType: lambda kind, field: st.dictionaries(
        draw(kind.key_type), draw(kind.value_type, field), max_size=3
    ),
    inspect.VarTupleType: draw_list,
    inspect.TupleType: lambda kind, _: st.tuples(*map(draw, kind.item_types)),
    inspect.StructType: lambda kind, _: st.fixed_dictionaries(
        {own.name: draw(own.type, own.name) for own in kind.fields}
    ),
}


def draw_fields(kind):
    fields = draw(inspect.type_info(kind))
    fixed = {"kind": kind.__struct_config__.tag} | ({"rank": 0} if kind is Header else {})
    return fields.map(lambda values: values | fixed)


records = st.sampled_from(get_args(Record)).flatmap(draw_fields)


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


@given(st.from_regex(r"\A-?(?:0x[01]\.[0-9a-f]{1,14}p[+-][0-9]{1,4}|inf|nan)\Z"))
def test_other_texts_of_floats_are_refused(text):
    """Two texts of one number would differ although its bits are equal."""
    record = {"kind": "digests", "moment": "", "epoch": 0, "step": 0, "totals": {}, "groups": {}}
    try:
        decode_record(to_json(record | {"loss": text}))
    except FieldError:
        return
    assert float.fromhex(text).hex() == text


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (Digests, {"epoch": -1}),
        (Digests, {"moment": "x" * 5000}),
        (Digests, {"totals": {"weights": "00"}}),
        (Digests, {"groups": {"g": {"n": "0" * 32 + "\n"}}}),
        (Digests, {"scalars": {"a": "1"}}),
        (End, {"status": "fine"}),
        (Evaluation, {"outputs": "F" * 32}),
        (Header, {"rank": 1}),
        (ProbeLayout, {"places": []}),
        (ProbeLayout, {"places": [["a", "b", 0]] * 2}),
        (RunFacts, {"train": [{"samples": 1, "batch_size": 1, "batches": 1, "later": 1}]}),
        (Resume, {"parent_check": "0"}),
    ],
)
@settings(max_examples=5)
@given(data=st.data())
def test_a_value_that_is_not_allowed_is_refused(kind, change, data):
    """With the name of its field."""
    record = data.draw(draw_fields(kind)) | ({"world_size": 1} if kind is Header else {})
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


def test_a_text_without_utf_8_is_escaped():
    """As the name of a file in Latin-1, at which a training must not end."""
    name = os.fsdecode(b"caf\xe9")
    records = [
        Checkpoint(path=f"{name}/a.ckpt", epoch=0, step=1, batch=0),
        End.failed(OSError(name)),
        make_digests("epoch", 0, groups={"weights": {name: "0" * 32}}),
        make_header(stack={name: name}, program={"command": name}),
        ProbeLayout(0, (("loss", name, 0),)),
    ]
    for record in records:
        written = decode_record(encode_record(record))
        assert written == parse_record(json.loads(json.dumps(record.as_record()).replace(*ESCAPED)))


def test_texts_and_numbers_of_subclasses_are_written_as_such():
    class Version(str):
        __slots__ = ()

    class Count(int):
        pass

    header = make_header(stack={"torch": Version("2"), "threads": Count(3)})
    assert decode_record(encode_record(header)).stack == {"torch": "2", "threads": 3}


def test_long_messages_are_cut():
    """An error's text may have any length."""
    end = End.failed(ValueError("x" * 10_000))
    assert len(end.error) == 4096
    assert decode_record(encode_record(end)) == end
    drift = RankDrift(moment="", epoch=0, step=0, rank=0, group="", name="x" * 5000)
    assert len(drift.name) == 4096
    resume = Resume(parent="", parent_check="", epoch=0, step=0, batch=0, inexact=("x" * 5000, "y"))
    assert [len(reason) for reason in resume.inexact] == [4096, 1]
