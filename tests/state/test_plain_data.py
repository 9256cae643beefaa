"""Objects between ranks: plain data arrives unchanged, everything else is refused."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_d9m.errors import RanksDisagreeError, SettingError
from lightning_d9m.state.plain_data import decode_plain, encode_plain
from lightning_d9m.state.state import digest_value

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


@pytest.mark.parametrize(
    "value",
    [
        {1, "a", (2.0, None)},
        1 + 2j,
        np.float32(0.1),
        np.arange(6, dtype=">i2").reshape(2, 3),
        torch.eye(3).to_sparse(),
        torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (2,), check_invariants=True),
    ],
)
def test_sets_arrays_and_sparse_tensors_arrive(value):
    (decoded,) = decode_plain(encode_plain([value]))
    assert digest_value(decoded) == digest_value(value)


def test_subclasses_arrive_as_their_base_class():
    decoded = decode_plain(encode_plain(type("Own", (float,), {})(0.1)))
    assert type(decoded) is float
    assert decoded == 0.1


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.eye(2).to_mkldnn(), "Tensors with layout torch._mkldnn"),
        ({"model": object()}, "An object of type object cannot be sent to another rank"),
        ([np.array([None])], "An array of dtype object cannot be sent to another rank"),
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


def test_sizes_in_place_of_bytes_are_read_as_earlier_versions_wrote_them():
    text = (
        b'[{"array": ["<f4", [1], 4]}, {"number": ["<f4", [], 4]}, {"tensor": ["float32", [], 4]}]'
    )
    assert decode_plain(sized(text) + np.ones(3, "<f4").tobytes()) == [1, 1, 1]


def test_a_dict_with_a_tensor_as_key_cannot_be_sent():
    with pytest.raises(SettingError, match="A tensor is a key of a dict"):
        encode_plain({torch.zeros(1): 1})
