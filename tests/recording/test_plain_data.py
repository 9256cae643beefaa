"""Objects between ranks: plain data arrives unchanged, everything else is refused."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_d9m.errors import RanksDisagreeError, SettingError
from lightning_d9m.recording.plain_data import decode_plain, encode_plain

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.just(Path("a/b"))
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors_arrive_with_dtype_and_shape(dtype, shape):
    tensor = torch.ones(shape).mul(3).to(dtype).requires_grad_(dtype.is_floating_point)
    (decoded,) = decode_plain(encode_plain([tensor]))
    assert (decoded.dtype, decoded.shape, decoded.requires_grad) == (dtype, tensor.shape, False)
    assert torch.equal(decoded, tensor)


def test_subclasses_arrive_as_their_base_class():
    decoded = decode_plain(encode_plain(np.float64(0.1)))
    assert type(decoded) is float
    assert decoded == 0.1


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"model": object()}, "An object of type object cannot be sent to another rank"),
        ([{1, 2}], "An object of type set cannot be sent to another rank"),
        (torch.eye(2).to_sparse(), "Tensors with layout torch.sparse_coo and dtype torch.float32"),
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
                b"[" * 100_000,
            ],
        ),
    ],
)
def test_a_pickle_and_other_bytes_are_refused(data):
    with pytest.raises(RanksDisagreeError, match="bytes that are not plain data"):
        decode_plain(data)
    assert not Attack.executed
