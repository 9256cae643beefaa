"""The edges of a run: forks and incomplete worlds."""

import os
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
from trainings import QUIET, make_loader, make_model

from lightning_d9m import DeterminismCallback, SettingError
from lightning_d9m.ledger.folder import read_ledger
from lightning_d9m.ledger.format.records import Digests, End
from lightning_d9m.lightning.trainer_attributes import ranks_of


@pytest.fixture
def lonely_trainer():
    """A Trainer of two ranks whose process group was never made."""
    strategy = SimpleNamespace(root_device="cpu", all_gather=lambda tensor: tensor)
    return SimpleNamespace(world_size=2, global_rank=0, strategy=strategy)


def test_a_failing_gather_does_not_hide_the_error_of_the_program(lonely_trainer):
    def fail():
        raise KeyError("of the program")

    with pytest.raises(KeyError, match="of the program"):
        ranks_of(lonely_trainer).raise_on_all(fail)
    with pytest.raises(SettingError, match="The Trainer has 2 ranks, but all_gather of"):
        ranks_of(lonely_trainer).raise_on_all(lambda: None)


class ForkEndedError(Exception):
    """Ends the fit in the forked child."""


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_child_forked_within_a_fit_leaves_its_parents_ledger_alone(tmp_path):
    def fork(self):
        child = os.fork()
        if child == 0:
            raise ForkEndedError
        os.waitpid(child, 0)

    trainer = pl.Trainer(
        callbacks=[DeterminismCallback()], **QUIET, max_epochs=1, default_root_dir=tmp_path
    )
    parent = os.getpid()
    try:
        trainer.fit(
            make_model(on_train_epoch_start=fork), make_loader(), make_loader(shuffle=False)
        )
    except BaseException:  # the child, after Lightning has called on_exception
        if os.getpid() != parent:
            os._exit(0)
        raise
    finally:
        if os.getpid() != parent:
            os._exit(0)
    records = list(read_ledger(tmp_path / "d9m").records(0))
    ends = [record for record in records if isinstance(record, End)]
    assert [end.status for end in ends] == ["finished"]
    assert [r.moment for r in records if isinstance(r, Digests)] == ["initial", "epoch", "final"]
