"""The digest of nested values: what counts, what does not, and what is refused."""

import functools
import math
import random
import threading
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from enum import Enum, Flag, IntEnum
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_d9m.engine.hashing.digest import digest_value
from lightning_d9m.errors import DigestError

Point = namedtuple("Point", "x y")  # noqa: PYI024 - the plain form is what old code has
Other = namedtuple("Other", "x y")  # noqa: PYI024 - another class of the same fields


@dataclass
class Record:
    content: object


class Color(Enum):
    """Members with equal values elsewhere."""

    RED = 1
    BLUE = 2


class Number(IntEnum):
    ONE = 1


class Bits(Flag):
    A = 1
    B = 2


# Two NaNs of which only the last bit differs, each equal to nothing; a field that is not set.
QUIET, ODD = np.array([0x7FF8 << 48, 0x7FF8 << 48 | 1], np.uint64).view(np.float64).tolist()
UNSET = Record(1)
del UNSET.content
# No two of these are the same value.
DISTINCT = [
    None, False, True, 0, 1, -1, 2**70, -(2**70), 10**5000, 0.0, -0.0, 1.0, math.inf,
    5e-324, 0j, 1 + 0j, complex(0.0, -0.0), "", "1", "None", "ü", "\ud800", b"", b"1", Path("1"),
    Path("a/b"), Color.RED, Color.BLUE, Number.ONE, Bits.A, Bits.A | Bits.B, [], (), {}, set(),
    [[]], [()], ([],), [1, 2], [2, 1], (1, 2), [[1], 2], [[1, 2]], {1, 2}, {1: 2}, {2: 1},
    {"1": 2}, {1: {}}, {(1, 2): 3}, {frozenset({1}): 3}, Point(1, 2), Other(1, 2), Record(1),
    Record([1]), torch.float32, torch.float64, torch.device("cpu"), torch.device("cuda", 1),
    torch.strided, torch.channels_last, math.sqrt, Counter, int, len, functools.partial(pow, 1),
    functools.partial(pow, 2), functools.partial(len, 1), torch.ones(1), torch.ones(1).double(),
    torch.ones(2), [torch.ones(1)], torch.Generator().manual_seed(1),
    torch.Generator().manual_seed(2), np.ones(1), np.ones(1, np.float32), np.ones((1, 1)),
    deque(), deque([1]), deque([2]), deque([1], 3), [deque([1])],
    QUIET, ODD, {QUIET: 1, ODD: 2}, {QUIET: 1, ODD: 3}, {QUIET: 1, float("nan"): 2}, {QUIET: 1},
    UNSET, Record(None), np.ones(1, ">f8"), np.float64(1), np.float32(1), np.int64(1), np.True_,
    np.datetime64(1, "s"), np.datetime64(1, "ms"), np.array("1"),
]  # fmt: skip

NESTED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
    ),
)


def test_different_values_have_different_digests():
    digests = [digest_value(value) for value in DISTINCT]
    assert len(set(digests)) == len(DISTINCT)
    assert [digest_value(value) for value in DISTINCT] == digests


@settings(max_examples=30, deadline=None)
@given(NESTED, NESTED)
def test_values_differ_exactly_if_their_text_does(one, other):
    def show(value):
        if isinstance(value, dict):
            return f"{{{sorted((repr(key), show(item)) for key, item in value.items())}}}"
        if isinstance(value, list | tuple):
            return f"{type(value).__name__}{[show(item) for item in value]}"
        return value.hex() if isinstance(value, float) else repr(value)

    if "nan" not in show(one) + show(other):  # whose bits the text does not show
        assert (digest_value(one) == digest_value(other)) is (show(one) == show(other))


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text() | st.integers() | st.booleans(), st.integers()), st.randoms())
def test_order_of_keys_does_not_count(entries, generator):
    items = list(entries.items())
    generator.shuffle(items)
    assert digest_value(dict(items)) == digest_value(entries)
    assert digest_value({key for key, _ in items}) == digest_value(frozenset(entries))


def test_class_of_a_mapping_does_not_count():
    plain = {"b": 1, "a": 2}
    same = [OrderedDict(plain), defaultdict(int, plain), Counter(plain), MappingProxyType(plain)]
    assert {digest_value(value) for value in same} == {digest_value(plain)}
    assert digest_value(bytearray(b"1")) == digest_value(b"1") == digest_value(memoryview(b"1"))
    assert digest_value(torch.Size([1, 2])) == digest_value((1, 2))


def test_value_that_holds_itself_is_refused():
    loop = {"a": [1]}
    loop["a"].append(loop)
    with pytest.raises(DigestError, match=r"value\['a'\]\[1\] is value itself: a value that holds"):
        digest_value(loop)
    shared = [1]
    assert digest_value([shared, shared]) == digest_value([[1], [1]])


def test_deeply_nested_value_is_refused():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(DigestError, match="nested this deeply"):
        digest_value(deep)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [threading.Lock()]}, r"value\['a'\]\[0\] is of type _thread\.lock, whose bytes"),
        (
            Record(object()),
            r"value\.content is of type builtins\.object, whose bytes are not defined",
        ),
        ({Point(1, object()): 1}, r"a key of value\.y is of type builtins\.object"),
        (iter([1]), r"value is of type builtins\.list_iterator, .* Pass its state as numbers"),
        (random.Random(1), r"value is of type random\.Random"),
        ({torch.ones(1): 1}, r"A key of value holds a tensor.* Use its name as the key"),
        (np.array([object()]), r"value is a NumPy \w+ of dtype object"),
        (np.zeros(1, "i4,f4"), r"value is a NumPy \w+ of dtype \[\('f0'.* Pass its fields"),
        (np.ma.masked_array([1], [True]), r"value is a NumPy MaskedArray of dtype int64"),
        (np.longdouble(1), r"value is a NumPy \w+ of dtype (float128|longdouble)"),
    ],
)
def test_what_has_no_defined_bytes_is_refused(value, message):
    with pytest.raises(DigestError, match=message):
        digest_value(value)
