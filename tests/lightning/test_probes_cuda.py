"""Probes of a fit on a CUDA device: what the CPU would say, and nothing waits for the device."""

import warnings

import pytest
import torch
from ledger_runs import list_batches
from trainings import make_model

from lightning_d9m.engine.hashing.digest import digest_many
from lightning_d9m.engine.probes.trace import ProbeCollector, ProbePoint

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def count_waits(work):
    """Return how often the host waited for the device."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return sum("synchronizing CUDA operation" in str(found.message) for found in caught)


def test_two_runs_have_the_same_probes_and_those_of_a_run_without(fit):
    first, second = (fit(trainer_accelerator="cuda", probes="all") for _ in range(2))
    assert len(list_batches(first)) >= 12
    assert list_batches(first) == list_batches(second)
    plain = fit(trainer_accelerator="cuda")
    assert plain.outcome(0).final == first.outcome(0).final


def test_no_probe_of_a_batch_waits_for_the_device():
    records = []
    probes = ProbeCollector(lambda record: records.append(record.as_record()))
    model = make_model().cuda()
    weights = dict(model.named_parameters())
    digest_many([*weights.values()])  # the kernel is compiled and checked here
    values = [torch.randn(1000, device="cuda") for _ in range(20)]

    def probe():
        for batch in range(2):
            probes.begin(ProbePoint(0, batch, batch))
            probes.add_leaves("weight", [*weights.items()])
            for number, value in enumerate(values):
                probes.add("output", str(number), value)
            probes.end()

    probe()  # memory is allocated
    assert count_waits(probe) == 0
    probes.close()
    assert len(records) == 5
    assert len({record["digests"] for record in records[1:]}) == 1
