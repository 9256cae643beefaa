"""The thread that finishes exchanges."""

import pytest
import torch

from lightning_d9m.logical_ranks.background import BackgroundThread


@pytest.fixture
def thread():
    it = BackgroundThread()
    yield it
    it.close()


def test_calls_run_in_order_without_gradients(thread):
    calls = []
    jobs = [
        thread.submit(lambda n=number: calls.append((n, torch.is_grad_enabled())))
        for number in range(3)
    ]
    jobs[-1].wait()
    assert calls == [(0, False), (1, False), (2, False)]


def test_an_error_is_raised_where_the_call_is_waited_for(thread):
    failed, good = thread.submit(lambda: int("x")), thread.submit(lambda: None)
    with pytest.raises(ValueError, match="invalid literal"):
        failed.wait()
    good.wait()


@pytest.mark.parametrize("flushes", [False, True])
def test_subnormal_numbers_are_treated_as_on_the_thread_that_starts_it(flushes):
    if not torch.set_flush_denormal(flushes):
        pytest.skip("this processor cannot flush subnormal numbers")
    sums = []
    try:
        thread = BackgroundThread()
        thread.submit(lambda: sums.append(torch.tensor([2.0**-140]).add(0.0).item())).wait()
        thread.close()
    finally:
        torch.set_flush_denormal(False)
    assert sums == [0.0 if flushes else 2.0**-140]
