"""CPU results differ between numbers of threads, and a pinned number makes them equal."""

import pytest
import torch

from lightning_d9m import SettingError, deterministic, digest
from lightning_d9m.control import torch_flags as threads_module
from lightning_d9m.control.torch_flags import read_threads, threads_pinned

pytestmark = pytest.mark.alone


@pytest.fixture(autouse=True)
def threads_restored():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def product():
    """Multiply a million numbers in one reduction, cut into a part for each thread."""
    numbers = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0))
    return digest((1 + numbers * 1e-4).prod())


def test_a_product_differs_between_numbers_of_threads():
    digests = []
    for number in (1, 2):
        torch.set_num_threads(number)
        digests.append(product())
    assert digests[0] != digests[1]


def test_a_pinned_number_makes_it_equal():
    digests = set()
    for number in (1, 2):
        torch.set_num_threads(number)
        with deterministic(threads=2):
            digests.add(product())
        assert torch.get_num_threads() == number
    assert len(digests) == 1


def test_a_number_that_somebody_changes_is_found():
    with deterministic(threads=2) as pinned:
        pinned.verify()
        torch.set_num_threads(1)
        with pytest.raises(SettingError, match="1 CPU threads are in use, and 2 were pinned"):
            pinned.verify()
        with deterministic() as free:
            free.verify()


@pytest.mark.parametrize("number", [None, 1])
@pytest.mark.parametrize("value", ["true", "TRUE", "1"])
def test_a_number_that_openmp_varies_is_refused(monkeypatch, number, value):
    """Under load, with two threads pinned, `product` was found to be that of one thread."""
    monkeypatch.setenv("OMP_DYNAMIC", value)
    with (
        pytest.raises(SettingError, match=f"OMP_DYNAMIC is '{value}'.*OMP_DYNAMIC=false"),
        threads_pinned(number),
    ):
        pass
    monkeypatch.setenv("OMP_DYNAMIC", "false")
    with threads_pinned(number):
        pass


@pytest.mark.parametrize(
    ("text", "number"), [("3", 3), ("", None), ("0", None), (" 2,1", 2), ("many", None)]
)
def test_the_number_of_the_user_is_that_at_the_start(monkeypatch, text, number):
    monkeypatch.setattr(threads_module, "_NUMBER_AT_START", text)
    monkeypatch.setenv("OMP_NUM_THREADS", "17")
    assert read_threads() == number
