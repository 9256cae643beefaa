"""With the fill of new tensors on, a program that reads what it never wrote is exact too."""

import pytest
import torch

from lightning_d9m import deterministic, digest

SIZE = 1000  # small enough for the allocator to hand the same memory out again


def read_uninitialized(byte, *, fill):
    """Leave bytes in memory, then read a new tensor that nobody has written to."""
    with deterministic(fill_uninitialized_memory=fill):
        for _ in range(8):
            torch.full((4 * SIZE,), byte, dtype=torch.uint8)
        return [digest(torch.empty(SIZE)) for _ in range(8)]


def test_without_the_fill_the_result_depends_on_what_was_in_memory():
    assert read_uninitialized(1, fill=False) != read_uninitialized(2, fill=False)


def test_with_the_fill_it_does_not():
    found = [read_uninitialized(byte, fill=True) for byte in (1, 2, 3)]
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == 1


@pytest.mark.parametrize("fill", [False, True])
def test_a_correct_program_has_the_same_bits_either_way(fill):
    with deterministic(seed=3, fill_uninitialized_memory=fill):
        weights = torch.empty(SIZE).uniform_()
    with deterministic(seed=3):
        assert torch.equal(torch.empty(SIZE).uniform_(), weights)
