"""What switches portable bits on: a setting, a session, the recorder, and d9m repeat."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from portable_data import Seen, start_worker
from rank_processes import run_ranks
from torch.utils.data import DataLoader

from lightning_d9m import Recorder, Settings, compare, deterministic, enable, portable
from lightning_d9m.engine.ledger.folder import read_ledger
from lightning_d9m.errors import SettingError, StackDifferenceError
from lightning_d9m.integrations.lightning.trainer_session import resolve_settings
from lightning_d9m.ops.portability import is_portable
from lightning_d9m.ops.portability.draws import draw
from lightning_d9m.tools.output.comparison_text import format_comparison


def test_a_session_computes_portable_bits_until_it_closes():
    with deterministic(portable=True):
        assert is_portable()
        with deterministic(seed=1):
            assert is_portable()
    assert not is_portable()
    with portable(), deterministic(seed=1) as session:
        assert is_portable()
        assert session.settings.as_record()["portable"] is True


def test_only_a_portable_run_records_the_setting():
    """The record of builds with and without CUDA is the same."""
    assert "portable" not in Settings().as_record()
    built, not_built = (Settings(portable=True, patch_ops=value) for value in (True, False))
    assert built.as_record() == not_built.as_record()
    assert built.as_record()["portable"] is True


def test_a_run_cannot_leave_the_portable_bits_of_its_session():
    with deterministic(portable=True):
        assert resolve_settings({}).portable
        with pytest.raises(SettingError, match="portable is False"):
            resolve_settings({"portable": False})


PROGRAM = """
from lightning_d9m import Recorder, deterministic
import torch
from lightning_d9m.ops.portability import is_portable
with deterministic(), deterministic(seed=1) as session:
    print(is_portable(), session.settings.as_record().get("portable"))
"""


def test_the_variable_alone_makes_the_session_of_a_program_portable():
    """Even where the package is imported before torch, so that the variable comes too late."""
    variables = os.environ | {"LIGHTNING_D9M_PORTABLE": "1"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.stdout == "True True\n", done.stderr


def test_a_generator_of_a_device_is_refused():
    generator = SimpleNamespace(device=torch.device("cuda:0"))
    with pytest.raises(SettingError, match="A generator is on cuda:0"):
        draw(4, generator)


def _record(folder, threads, *, portable=True, reference=None, **options):
    """Train a linear layer with a recorder on this many threads; return the ledger."""
    with deterministic(seed=1, threads=threads):
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.param_groups[0].update(options)
        with Recorder(folder, model, optimizer, portable=portable, reference=reference) as run:
            for batch in run.batches([torch.ones(4, 3)]):
                assert is_portable() == portable
                model(batch).sum().backward()
                optimizer.step()
                run.step()
            run.epoch()
        assert not is_portable()
        return run.ledger


def test_a_portable_reference_of_another_stack_is_accepted_and_the_report_lists_it(tmp_path):
    first = _record(tmp_path / "a", 1)
    assert read_ledger(first).header.settings["portable"] is True
    second = _record(tmp_path / "b", 2, reference=first)
    found = compare(first, second)
    assert found.equal
    assert [one.field for one in found.stack] == ["threads.intraop"]
    text = "\n".join(format_comparison(found))
    assert "The stacks differ; portable bits do not depend on them:" in text
    assert "threads.intraop" in text


def test_options_that_only_one_version_of_torch_has_do_not_count_in_portable_runs(tmp_path):
    """AdamW has had ``decoupled_weight_decay=True`` since torch 2.7."""
    first = _record(tmp_path / "a", 1)
    assert compare(first, _record(tmp_path / "b", 1, new=True, other=None)).equal
    assert not compare(first, _record(tmp_path / "c", 1, new=0.5)).equal
    assert not compare(first, _record(tmp_path / "d", 1, nesterov=True)).equal
    plain = _record(tmp_path / "e", 1, portable=False)
    assert not compare(plain, _record(tmp_path / "f", 1, portable=False, new=True)).equal


def test_a_reference_of_another_stack_is_refused_without_portable_bits(tmp_path):
    first = _record(tmp_path / "a", 1, portable=False)
    with pytest.raises(StackDifferenceError):
        _record(tmp_path / "b", 2, portable=False, reference=first)


def test_logical_ranks_have_the_same_portable_bits_on_one_process_and_on_three(tmp_path):
    """Also without vector instructions, and with another number of threads."""
    script = Path(__file__).parents[1] / "support" / "portable_ranks.py"
    run_ranks(script, 1, tmp_path, ATEN_CPU_CAPABILITY="default")
    run_ranks(script, 3, tmp_path, OMP_NUM_THREADS="2")
    one, three = (read_ledger(next((tmp_path / str(count)).iterdir())) for count in (1, 3))
    assert one.header.settings["portable"] is True
    assert one.outcome(0).final.totals == three.outcome(0).final.totals


def test_an_inner_session_cannot_leave_portable_bits():
    with deterministic(portable=True):
        with pytest.raises(SettingError, match="portable is False, but an outer session"):
            enable(portable=False)
        with (
            pytest.raises(SettingError, match="end the outer one first"),
            deterministic(portable=False),
        ):
            pass
    with deterministic(portable=False):
        assert not is_portable()
    enable(portable=True)
    enable(portable=False).close()  # it replaces the session before it
    assert not is_portable()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_session_travels_to_workers(method):
    """Also the user's own function still runs, and the loader stays as it was."""
    loader = DataLoader(
        Seen(), 1, num_workers=1, multiprocessing_context=method, worker_init_fn=start_worker
    )
    with deterministic(portable=True):
        expected = [Seen()[index] for index in range(2)]
        found = [tuple(one.item() for one in batch) for batch in loader]
    assert found == expected
    assert found[0][1:] == (True, True)
    assert loader.worker_init_fn is start_worker
    assert "_get_iterator" not in vars(loader)
    if method == "fork":
        assert next(iter(loader))[1].item() is False
