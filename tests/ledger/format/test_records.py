"""The schema of records: what was written is read, and nothing else is."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_d9m.ledger.format.records import (
    MAX_DEPTH,
    Digests,
    End,
    Evaluation,
    FieldError,
    Header,
    LoaderFacts,
    Opaque,
    ProbeLayout,
    RankDrift,
    ReplayDrift,
    Resume,
    RunFacts,
    decode_record,
    encode_record,
)

names = st.text(max_size=20)
scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | names
scalars |= st.floats(allow_nan=False, allow_infinity=False)
digests = st.binary(min_size=16, max_size=16).map(bytes.hex)
counts = st.integers(0, 2**63 - 1)
hex_floats = st.floats().map(float.hex)
unknown = st.dictionaries(
    names.map(lambda name: f"later {name}"),
    st.recursive(
        scalars, lambda inner: st.lists(inner) | st.dictionaries(names, inner), max_leaves=5
    ),
    max_size=2,
)
records = st.one_of(
    st.builds(
        RunFacts,
        model=names,
        parameters=counts,
        train=st.lists(
            st.builds(LoaderFacts, *[st.none() | counts] * 3, extra=unknown), max_size=3
        ).map(tuple),
        trainer=st.dictionaries(names, scalars, max_size=3),
        extra=unknown,
    ),
    st.builds(
        Digests,
        moment=names,
        epoch=counts,
        step=counts,
        totals=st.dictionaries(names, digests, max_size=3),
        groups=st.dictionaries(names, st.dictionaries(names, digests, max_size=3), max_size=2),
        loss=st.none() | hex_floats,
        scalars=st.dictionaries(names, hex_floats, max_size=3),
        extra=unknown,
    ),
    st.builds(
        End,
        status=st.sampled_from(["finished", "failed"]),
        error=st.none() | names,
        drift=st.none()
        | st.builds(
            RankDrift,
            moment=names,
            epoch=counts,
            step=counts,
            rank=st.integers(0, 65_535),
            group=names,
            name=names,
        ),
        extra=unknown,
    ),
    st.builds(
        Evaluation,
        name=names,
        epoch=counts,
        step=counts,
        batches=counts,
        outputs=digests,
        undigested=counts,
        problem=st.none() | names,
        scalars=st.dictionaries(names, hex_floats, max_size=3),
        extra=unknown,
    ),
    st.builds(
        ReplayDrift,
        epoch=counts,
        step=counts,
        batch=counts,
        place=st.tuples(names, names, counts),
        expected=st.none() | digests,
        actual=st.none() | digests,
        count=counts,
        total=counts,
        extra=unknown,
    ),
    st.builds(
        Resume,
        parent=names,
        parent_check=st.just("") | st.binary(min_size=8, max_size=8).map(bytes.hex),
        epoch=counts,
        step=counts,
        batch=counts,
        inexact=st.lists(names, max_size=2).map(tuple),
        extra=unknown,
    ),
    st.builds(Opaque, names.map(lambda name: f"kind {name}"), unknown),
)
headers = st.integers(1, 65_536).flatmap(
    lambda world_size: st.builds(
        Header,
        rank=st.integers(0, world_size - 1),
        world_size=st.just(world_size),
        fit=counts,
        seed=counts,
        created=names,
        settings=st.dictionaries(names, scalars, max_size=3),
        stack=st.dictionaries(names, scalars, max_size=3),
        package=names,
        extra=unknown,
    )
)


def to_json(fields):
    """Return JSON text that need not be of a record."""
    return json.dumps(fields, separators=(",", ":")).encode()


@settings(max_examples=60, deadline=None)
@given(record=headers | records)
def test_any_record_comes_back_as_it_was(record):
    """Names may be any text; unknown fields and kinds are kept, also in parts of a record."""
    body = encode_record(record.as_record())
    assert decode_record(body) == record
    assert to_json(decode_record(body).as_record()) == body


@settings(max_examples=60, deadline=None)
@given(record=headers | records, data=st.data())
def test_a_text_that_is_read_says_what_the_record_says(record, data):
    """Change, add or remove any field: the text is refused, or its record has the change."""
    fields = record.as_record()
    name = data.draw(st.sampled_from(sorted(fields)) | names)
    value = data.draw(scalars | st.just({}) | st.just([{}]))
    changed = {**fields, name: value}
    if data.draw(st.booleans()):
        del changed[name]
    try:
        read = decode_record(to_json(changed))
    except FieldError:
        return
    again = read.as_record()
    # What is missing has its default.
    said = {key: again[key] if key in again else getattr(read, key) for key in changed}
    assert to_json(said) == to_json(changed)


@given(st.floats() | st.floats(allow_subnormal=True, width=16))
def test_floats_are_texts_that_float_hex_gives(value):
    record = {"kind": "digests", "moment": "", "epoch": 0, "step": 0, "totals": {}, "groups": {}}
    assert decode_record(to_json(record | {"loss": value.hex()})).loss == value.hex()


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
    "run": {"model": "m", "parameters": 1, "train": [], "trainer": {}},
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
    "probes": {"epoch": 0, "step": 0, "batch": 0, "layout": 0, "digests": "0" * 32},
    "frames": {"bytes": 8, "last": "0" * 16},
    "resume": {"parent": "", "parent_check": "", "epoch": 0, "step": 0, "batch": 0},
}


@pytest.mark.parametrize("kind", EXAMPLES)
def test_each_field_of_an_example_is_required_or_has_a_default(kind):
    record = {"kind": kind, "schema": 2} if kind == "header" else {"kind": kind}
    record |= EXAMPLES[kind]
    decode_record(to_json(record))
    for name in record.keys() - {"kind", "trainer"}:
        with pytest.raises(FieldError, match=f"required field `{name}`|'{name}' is missing"):
            decode_record(to_json({key: record[key] for key in record if key != name}))


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("digests", {"epoch": -1}),
        ("digests", {"epoch": True}),
        ("digests", {"epoch": 1.0}),
        ("digests", {"step": 2**63}),
        ("digests", {"moment": 7}),
        ("digests", {"moment": "x" * 5000}),
        ("digests", {"totals": None}),
        ("digests", {"totals": {"weights": "00"}}),
        ("digests", {"groups": []}),
        ("digests", {"groups": {"g": {"n": "A" * 32}}}),
        ("digests", {"groups": {"g": {"n": "0" * 32 + "\n"}}}),
        ("digests", {"groups": {"g": {"n" * 5000: "0" * 32}}}),
        ("digests", {"loss": 0.5}),
        ("digests", {"scalars": {"a": "1"}}),
        ("digests", {"sketches": {"w": "0" * 127}}),
        ("digests", {"sketches": {"w": "F" * 128}}),
        ("end", {"status": "fine"}),
        ("end", {"error": [1]}),
        ("end", {"drift": {"moment": ""}}),
        ("run", {"train": {}}),
        ("run", {"train": [1]}),
        ("run", {"train": [{"samples": "x", "batch_size": 1, "batches": 1}]}),
        ("run", {"trainer": {"a": [1]}}),
        ("run", {"trainer": {"a": "x" * 5000}}),
        ("evaluation", {"outputs": "0"}),
        ("evaluation", {"undigested": -1}),
        ("replay", {"place": ["a", "b"]}),
        ("replay", {"actual": "F" * 32}),
        ("header", {"world_size": 0}),
        ("header", {"world_size": 10**9}),
        ("header", {"rank": 1}),
        ("header", {"stack": None}),
        ("header", {"schema": "1"}),
        ("header", {"schema": 0}),
        ("layout", {"places": []}),
        ("layout", {"places": [["a", "b", 0]] * 2}),
        ("layout", {"later": 1}),
        ("probes", {"digests": "F" * 32}),
        ("probes", {"digests": "00 00" * 8}),
        ("probes", {"digests": 3}),
        ("probes", {"steps": 256}),
        ("probes", {"count": 0}),
        ("frames", {"later": 1}),
        ("resume", {"parent_check": "0"}),
        ("resume", {"inexact": "text"}),
    ],
)
def test_a_value_that_is_not_allowed_is_refused(kind, change):
    """With the name of its field."""
    record = {"kind": kind, "schema": 2} if kind == "header" else {"kind": kind}
    record |= EXAMPLES[kind]
    decode_record(to_json(record))
    (name,) = change
    with pytest.raises(FieldError) as caught:
        decode_record(to_json(record | change))
    assert name in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"kind":"probe","x":NaN}', "is not JSON"),
        (b'{"kind":"probe","x":1,"x":2}', "names a field twice"),
        (b'{"kind":"probe","x":{"y":1,"y":1}}', "names a field twice"),
        (b'{"kind":"later","x":[{},{},[{"a":1,"a":2}]]}', "names a field twice"),
        (b'{"kind":"probe", "x":1}', "is not compact"),
        (b'{"kind":"probe","x":1E2}', "is not compact"),
        (b'{"kind":"probe","x":0.10000000000000000001}', "is not compact"),
        (b'{"kind":"probe","check":"0"}', "field 'check' occurs twice"),
        (b'{"kind":"probe","x":"\xff"}', "is not JSON: .*position 21: invalid start byte"),
        (b'{"kind":"probe","x":' + b"[" * 17 + b"]" * 17 + b"}", "nests deeper than 16"),
        (b'{"kind":"probe","x":' + b"[" * 10**5 + b"]" * 10**5 + b"}", "nests deeper than 16"),
        (b'{"kind":"probe","x":[' + b"0," * 10**6 + b"0]}", "holds more than 1000000 values"),
        (b'{"kind":"probe","x":' + b"9" * 5000 + b"}", "is not JSON"),
        (b'{"kind":7}', "field 'kind' must be a short text, and is 7"),
        (b'{"x":7,"kind":"end"}', "field 'kind' must come first"),
        (b"[1]", "field 'kind' must come first"),
        (b"1", "field 'kind' must come first"),
        (b"nonsense", "is not JSON: "),
    ],
)
def test_a_body_that_is_no_record(body, message):
    with pytest.raises(FieldError, match=message):
        decode_record(body)


def nested(depth):
    value = '{[\\"' * 20  # brackets within a text do not nest
    for level in range(depth):
        value = {"a": value} if level % 2 else [value]
    return {"kind": "later", "x": value}


def test_nesting_up_to_the_bound():
    assert decode_record(encode_record(nested(MAX_DEPTH))).as_record() == nested(MAX_DEPTH)
    with pytest.raises(FieldError, match="nests deeper than 16 levels"):
        encode_record(nested(MAX_DEPTH + 1))


@pytest.mark.parametrize("value", [float("nan"), object(), {1, 2}])
def test_a_value_that_is_no_json_is_not_written(value):
    with pytest.raises(FieldError, match="cannot be written as JSON"):
        encode_record({"kind": "later", "value": value})


def test_long_messages_are_cut():
    """An error's text may have any length."""
    end = End.failed(ValueError("x" * 10_000))
    assert len(end.error) == 4096
    assert decode_record(encode_record(end.as_record())) == end
    drift = RankDrift(moment="", epoch=0, step=0, rank=0, group="", name="x" * 5000)
    assert len(drift.name) == 4096
    resume = Resume(parent="", parent_check="", epoch=0, step=0, batch=0, inexact=("x" * 5000, "y"))
    assert [len(reason) for reason in resume.inexact] == [4096, 1]


def test_a_place_may_occur_once_in_a_layout():
    places = (("output", "a", 0), ("output", "a", 1))
    assert decode_record(encode_record(ProbeLayout(3, places).as_record())).places == places
