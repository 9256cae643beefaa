"""Sums and tensors of all logical ranks are the same on every number of processes."""

import math
import struct

import pytest
import torch
from gloo_threads import run_processes
from hypothesis import given
from hypothesis import strategies as st
from logical_sums import bits

from lightning_d9m.errors import RanksDisagreeError, SettingError
from lightning_d9m.logical_ranks import scalars
from lightning_d9m.logical_ranks.blocks import Blocks
from lightning_d9m.logical_ranks.scalars import (
    exact_sum,
    gather_by_logical_rank,
    gather_bytes,
    sum_exactly,
)


def test_the_sum_has_the_same_bits_on_every_number_of_processes():
    values = [0.1, 1e16, -1e16, 0.7, 3.3, 1e-9, -2.5, 1e8]
    for processes in (1, 2, 3, 4):
        blocks = Blocks(8, processes)
        sums = run_processes(
            processes,
            lambda process, group, b=blocks: exact_sum([values[v] for v in b.of(process)], group),
        )
        assert {struct.pack("d", total) for total in sums} == {struct.pack("d", math.fsum(values))}
    assert sum(values) != math.fsum(values)  # rounding at each step is something else


@given(st.lists(st.floats(width=64)), st.randoms())
def test_the_order_changes_no_bit_of_a_sum(values, shuffler):
    mixed = shuffler.sample(values, len(values))
    assert struct.pack("d", sum_exactly(values)) == struct.pack("d", sum_exactly(mixed))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], 0.0),
        ([1e308, 1e308, -1e308], 1e308),
        ([1e308, 1e308], math.inf),
        ([-1e308, -1e308], -math.inf),
        ([math.inf, 1.0, 1e308, 1e308], math.inf),
        ([-math.inf, 1.0], -math.inf),
    ],
)
def test_a_sum_of_large_values_is_what_the_exact_one_rounds_to(values, expected):
    assert sum_exactly(values) == expected


@pytest.mark.parametrize("values", [[math.inf, -math.inf], [math.nan, 1.0], [math.nan, math.inf]])
def test_a_sum_without_a_value_is_nan(values):
    assert math.isnan(sum_exactly(values))


def test_tensors_come_in_order_of_logical_ranks():
    values = [
        torch.arange(5.0),
        torch.randn(2, 3).t(),
        torch.tensor(7, dtype=torch.int8),
        torch.empty(0, 4),
        torch.randn(3000).bfloat16(),  # more than the first message holds
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]).conj(),
    ]
    for processes in (1, 2, 3):
        blocks = Blocks(7, processes)
        for gathered in run_processes(
            processes,
            lambda process, group, b=blocks: gather_by_logical_rank(
                [values[v] for v in b.of(process)], b, group
            ),
        ):
            assert [bits(tensor) for tensor in gathered] == [
                bits(value.resolve_conj()) for value in values
            ]


def test_tensors_are_gathered_in_inference_mode():
    def gather(process, group):
        with torch.inference_mode():
            return gather_by_logical_rank([torch.ones(2) * process], Blocks(2, 2), group)[
                1
            ].tolist()

    assert run_processes(2, gather) == [[1.0, 1.0]] * 2


def test_bytes_of_any_length_arrive():
    for length in (0, 1, scalars._FIRST_BYTES - 8, scalars._FIRST_BYTES - 7, 10**5):
        parts = [b"a" * length, b"b" * (length // 2)]
        assert run_processes(2, lambda p, group, s=parts: gather_bytes(s[p], group)) == [parts] * 2


def test_a_tensor_too_many_is_refused():
    with pytest.raises(SettingError, match="3 tensors came in for 2 logical ranks"):
        gather_by_logical_rank([torch.ones(1)] * 3, Blocks(2, 1))


def test_a_sparse_tensor_is_refused():
    with pytest.raises(SettingError, match=r"layout torch.sparse_coo .*Gather its dense parts"):
        gather_by_logical_rank([torch.ones(2).to_sparse()], Blocks(1, 1))


@pytest.mark.parametrize("data", [b"", b"\0" * 8, b"\x05" + b"\0" * 7 + b"[[1]]"])
def test_bytes_that_are_not_tensors_are_reported(data):
    with pytest.raises(RanksDisagreeError, match="the same version of lightning_d9m"):
        scalars._decode(data)
