"""The edges of a run: checkpoints loaded outside it, threads, forks and incomplete worlds."""

import os
from threading import Thread
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
from trainings import QUIET, make_loader, make_model

from lightning_d9m import DeterminismCallback, SettingError
from lightning_d9m.ledger.folder import read_ledger
from lightning_d9m.ledger.format.records import Digests, End
from lightning_d9m.lightning.trainer_attributes import ranks_of


def make_trainer(folder, **options):
    options = QUIET | {"max_epochs": 1, "default_root_dir": folder} | options
    return pl.Trainer(callbacks=[DeterminismCallback()], **options)


def test_a_gather_without_the_other_ranks_says_so_and_hides_no_error_of_the_program():
    """A Trainer of two ranks whose process group was never made."""
    strategy = SimpleNamespace(root_device="cpu", all_gather=lambda tensor: tensor)
    ranks = ranks_of(SimpleNamespace(world_size=2, global_rank=0, strategy=strategy))
    with pytest.raises(SettingError, match="The Trainer has 2 ranks, but all_gather of"):
        ranks.gather_json(1)
    with pytest.raises(SettingError, match="The Trainer has 2 ranks"):
        ranks.raise_on_all(lambda: None)
    with pytest.raises(KeyError, match="of the program"):
        ranks.raise_on_all(lambda: {}["of the program"])


def test_a_fit_in_a_second_thread_is_refused_at_its_start(tmp_path):
    errors = []

    def fit_inside():
        try:
            make_trainer(tmp_path / "inner").fit(
                make_model(), make_loader(), make_loader(shuffle=False)
            )
        except SettingError as error:
            errors.append(str(error))

    def start_thread(self):
        thread = Thread(target=fit_inside, name="second")
        thread.start()
        thread.join()

    model = make_model(on_train_start=start_thread)
    make_trainer(tmp_path / "outer").fit(model, make_loader(), make_loader(shuffle=False))
    (error,) = errors
    assert "is open in thread 'MainThread', so thread 'second' cannot open another one" in error
    assert not (tmp_path / "inner").exists()
    fit_inside()
    assert len(errors) == 1


class ForkEndedError(Exception):
    """Ends the fit in the forked child."""


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_child_forked_within_a_fit_leaves_its_parents_ledger_alone(tmp_path):
    def fork(self):
        child = os.fork()
        if child == 0:
            raise ForkEndedError
        os.waitpid(child, 0)

    trainer = make_trainer(tmp_path)
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
