"""Objects between ranks: plain data arrives unchanged, everything else is refused."""

import json
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_d9m.engine.state.plain_data import _FORMATS, decode_plain, encode_plain
from lightning_d9m.errors import RanksDisagreeError, SettingError

DATA = [
    *(torch.tensor([[3, 0]]).to(kind) for kind in (torch.bfloat16, torch.float32, torch.bool)),
    *(torch.ones(()), torch.ones(0, 3), torch.eye(3).to_sparse()),
    torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (2,), check_invariants=True),
    *(np.float32(0.1), np.arange(6, dtype=">i2").reshape(2, 3), np.zeros((0, 2))),
    np.ones(2, [("a", "f4"), ("b", "u1", (2,))]),
    *({2.0}, {(2.0, None)}, deque([1], 3), 1 + 2j, Path("a/b")),
    *(Counter(a=2, b=0.5), OrderedDict({2: ()}), defaultdict(list, a=[1]), defaultdict(None)),
]
LEAVES = (
    st.sampled_from(DATA)
    | st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.booleans()), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(VALUES)
def test_plain_data_arrives_unchanged(value):
    decoded = decode_plain(encode_plain(value))
    assert repr(decoded) == repr(value)  # also the types, and the sign of zero


def test_subclasses_arrive_as_their_base_class_and_tensors_without_their_graph():
    values = [type("Own", (float,), {})(0.1), {1, "a"}, torch.ones(2, requires_grad=True)]
    decoded = decode_plain(encode_plain(values))
    assert type(decoded[0]) is float
    assert decoded[:2] == values[:2]
    assert not decoded[2].requires_grad
    (made,) = decode_plain(encode_plain([defaultdict(lambda: 1, a=2)]))
    assert (type(made), made.default_factory, made) == (defaultdict, None, {"a": 2})


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.eye(2).to_mkldnn(), "Tensors with layout torch._mkldnn"),
        ({"model": object()}, "An object of type object cannot be sent to another rank"),
        ([np.array([None])], "An array of dtype object cannot be sent to another rank"),
        ({torch.zeros(1): 1}, "A tensor is a key of a dict"),
    ],
)
def test_other_objects_are_refused(value, words):
    with pytest.raises(SettingError, match=words):
        encode_plain(value)


class Attack:
    """Runs code when it is unpickled."""

    executed = False

    @classmethod
    def execute(cls):
        cls.executed = True

    def __reduce__(self):
        return Attack.execute, ()


def sized(text):
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Attack()),
        pickle.dumps({"plain": 1}),
        b"",
        b"\xff",
        *map(
            sized,
            [
                b'{"model": 1}',
                b'{"tuple": [], "dict": []}',
                b'{"tensor": ["load", [1], 0]}',
                b'{"tensor": ["float32", [5], 0]}',
                b'{"tensor": ["float32", [1], 4]}',
                b'{"bytes": 10000000000}',
                b'{"bytes": -1}',
                b'{"tensor": ["onnx", [0], {"bytes": 0}]}',
                b'{"array": ["O", [1], {"bytes": 8}]}12345678',
                b'{"array": ["i1,O", [1], {"bytes": 9}]}123456789',
                b'{"array": ["<i8", [1%s], {"bytes": 8}]}12345678' % (b"0" * 30),
                b"[" * 100_000,
            ],
        ),
    ],
)
def test_a_pickle_and_other_bytes_are_refused(data):
    with pytest.raises(RanksDisagreeError, match="bytes that are not plain data"):
        decode_plain(data)
    assert not Attack.executed


JSON = st.recursive(
    st.none()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from([10**30, "<i8"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([*_FORMATS, "bytes", "model"]), inner, max_size=1)
    ),
    max_leaves=8,
)


@given(JSON, st.binary(max_size=40))
def test_hostile_bytes_are_plain_data_or_refused(value, contents):
    with suppress(RanksDisagreeError):
        found = decode_plain(sized(json.dumps(value).encode()) + contents)
        encode_plain(found)
