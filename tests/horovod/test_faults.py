"""If one rank fails, every rank ends, names the cause, and leaves a readable ledger."""

import os
import re
import signal
import traceback
from pathlib import Path

import pytest
import torch
from rank_processes import RANK, call_on_ranks, has_ended
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from trainings import NoisyDigits, fit, make_loader, make_model

from lightning_d9m.engine.ledger.folder import read_ledger

pytestmark = [pytest.mark.horovod, pytest.mark.timeout(600)]
PACKAGE = "pytorch_lightning"  # this one too
DIFFERENT = "RanksDisagreeError: The ranks are about to do different things"
LOST = "RankLostError: Rank 0 waited for the backward pass"
# The fault, the error of rank 0 and that of rank 1; None for a rank that is killed, which comes
# last: after it, nothing can follow.
FAULTS = {
    "batches": (rf"(?s){DIFFERENT}.*rank 0: training on 8 .*rank 1: training on 6 batches",) * 2,
    "stream": (rf"(?s){DIFFERENT}.*rank 0: the backward pass.*rank 1: the end of validation",) * 2,
    "settings": (r"(?s)StackDifferenceError: Rank 1 .*strategy.bucket_bytes.*this run:  1024",) * 2,
    "validation": (rf"(?s){DIFFERENT}.*rank 0: the end of validation.*rank 1: all_gather",) * 2,
    "ulp": (r"DriftError: Ranks 0 and 1 differ from .*1 of 6 weights differ, first layers",) * 2,
    "raising": (
        r"RankLostError: .*Rank 1 ended with ValueError: the third batch is bad",
        "ValueError: the third batch is bad",
    ),
    "killed": (rf"{LOST}.*Rank 1 \(process \d+\) was killed or exited\.", None),
}


class Stream(IterableDataset):
    """A dataset of unknown length, which is shorter on rank 1."""

    def __iter__(self):
        digits = NoisyDigits(96 if RANK else 128)
        yield from (digits[number] for number in range(len(digits)))


def train(fault, folder):
    from lightning_d9m import HorovodDeterministicStrategy

    broken = fault if RANK else ""

    def training_step(model, batch, index):
        if index == 2 and broken == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 2 and broken == "raising":
            raise ValueError("the third batch is bad")
        return nn.functional.cross_entropy(model.layers(batch[0]), batch[1])

    def on_train_batch_end(model, outputs, batch, index):
        if index == 7 and broken == "ulp":
            weight = model.layers[0].weight.data
            weight[3, 2] = torch.nextafter(weight[3, 2], torch.tensor(9.0))

    def validation_step(model, batch, index):
        if broken == "validation":
            model.all_gather(torch.zeros(2))

    hooks = (training_step, on_train_batch_end, validation_step)
    loader = make_loader(size=96 if broken == "batches" else 128)
    fit(
        make_model(PACKAGE, **{hook.__name__: hook for hook in hooks}),
        DataLoader(Stream(), batch_size=16) if fault == "stream" else loader,
        make_loader(size=32),
        package=PACKAGE,
        folder=folder,
        strategy=HorovodDeterministicStrategy(
            **{"bucket_bytes": 1024} if broken == "settings" else {}
        ),
        use_distributed_sampler=False,
    )


def break_rank(folder):
    """Train with each fault, and write the errors; the last one ends the process."""
    Path(folder, f"pid-{RANK}").write_text(str(os.getpid()))
    for fault in FAULTS:
        own = Path(folder, fault)
        own.mkdir(exist_ok=True)
        try:
            train(fault, own / "d9m")
        except Exception as error:
            text = f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}"
            Path(own, f"error-{RANK}").write_text(text)
            if fault == [*FAULTS][-1]:
                raise


def test_every_rank_ends_with_the_cause(tmp_path):
    """The launcher returns, no process is left, and the errors name the fault."""
    (status,), (output,) = call_on_ranks(break_rank, 2, tmp_path, fails=True, horovod=True)
    assert status != 0
    for fault, errors in FAULTS.items():
        for rank, expected in enumerate(errors):
            error = tmp_path / fault / f"error-{rank}"
            if expected is None:
                assert not error.exists()
            else:
                assert error.exists(), output[-4000:]
                assert re.search(expected, error.read_text()), error.read_text()
        if fault != "settings":  # which is found before the fit
            ledger = read_ledger(tmp_path / fault / "d9m")
            assert [len(list(ledger.records(rank))) > 0 for rank in range(2)] == [True, True]
    for rank in range(2):
        assert has_ended(int((tmp_path / f"pid-{rank}").read_text()))
