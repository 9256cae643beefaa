"""``d9m repeat`` compares runs and names every way in which a command can fail.

With ``--processes`` on several numbers of processes; with ``--interrupt`` a straight run and
segments that resume from its checkpoints.
"""

import json
import re
import sys
from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError

import pytest
import torch
from ledger_program import PROGRAM
from rank_processes import has_ended
from scripts import execute

from lightning_d9m import D9mError
from lightning_d9m.tools.cli.repeat import _OBJECTS
from lightning_d9m.tools.launch import processes

SUPPORT = Path(__file__).parents[1] / "support"
FORCE = ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")


@pytest.fixture
def repeat(tmp_path, monkeypatch, d9m):
    """Return a function that repeats a program; it gives (status, output, errors)."""
    monkeypatch.chdir(tmp_path)

    def run(code, *options, words=()):
        script = tmp_path / "script.py"
        script.write_text(PROGRAM + code)
        return d9m("repeat", *options, "--", sys.executable, script, *words)

    return run


def rows(output):
    """Return the lines of the table, which stands below the verdict, without its titles."""
    return output.split("\n\n")[1].splitlines()[1:]


def test_a_run_that_differs_is_named_with_the_first_divergence(repeat):
    status, out, _ = repeat("train(1 if run == 2 else 7)", "-n", "3")
    assert status == 1
    assert [line.split()[-1] for line in rows(out)] == ["reference", "differs", "equal"]
    assert "Rank 0 diverges first, in the initial state." in " ".join(out.split())
    assert out.startswith("different: 1 of 3 runs differs from run 1. Run 2: ")
    assert "  d9m locate --tries 4 -- " in out
    assert "  d9m report d9m-runs/000\n" in out  # of all three
    assert (
        max(len(line) for line in out.splitlines() if not re.search("d9m-runs|  d9m", line)) <= 80
    )


PORTABLE = """
names = ("LIGHTNING_D9M_PORTABLE", "OMP_NUM_THREADS", "ATEN_CPU_CAPABILITY")
given = [os.environ.get(name, "") for name in names]
open("noted", "a").write(" ".join(given) + ";")
stack = {"threads.intraop": given[1]}
settings = {"portable": True}
"""


def test_portable_runs_have_other_stacks_and_one_digest(repeat, tmp_path, monkeypatch):
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    same = f"{PORTABLE}train(stack=stack, settings=settings)"
    status, out, _ = repeat(same, "--portable")
    assert status == 0
    assert "agree bit for bit" in out
    assert len(rows(out)) == 3
    assert (tmp_path / "noted").read_text() == "1 1 ;1 2 ;1 1 default;"
    other = f"{PORTABLE}train(int(given[1]), stack=stack, settings=settings)"
    assert repeat(other, "--portable")[0] == 1


@pytest.mark.parametrize(
    ("value", "rare", "left", "tries"),
    [
        ("run // 3", True, False, "--tries 4 "),
        ("min(2, run)", False, True, ""),
        ("run", 0, 0, ""),
        ("7", 0, 0, None),
    ],
)
def test_what_the_runs_together_show_is_said(repeat, value, rare, left, tries):
    out = " ".join(repeat(f"train({value})", "-n", "3")[1].split())
    power = "-n 29 would show a difference in 10% of the runs with 95%."
    assert (power in out) == (tries is None)
    assert tries is None or f"d9m locate {tries}--" in out
    assert ("1 of 2 pairs differ, so one pair of runs may miss it." in out) == rare
    assert ("look for files that run 1 left and later runs read" in out) == left


def test_files_that_carry_a_difference_from_run_to_run_are_named(repeat):
    count = "Path('count').open('a').write('x')\nseen = Path('count').stat().st_size\n"
    assert "a later one: count.\n" in repeat(count + "train(seen)")[1]
    left = json.loads(repeat(count + "train(seen)", "--json")[1])["left"]
    assert left == ["Files written in one run and read or written in a later one: count."]


def test_equal_fits_of_a_program_that_prints_other_results(repeat):
    """Times do not count, nor a progress bar that was wiped away."""
    printed = "print('took', run, 's'); print(' ' * run + '\\n' * run)"
    assert "note:" not in repeat(f"train()\n{printed}")[1]
    status, out, _ = repeat(f"train()\n{printed}; print('accuracy', run)")
    assert status == 0
    words = " ".join(out.split())
    assert "note: the runs printed different output, such as 'accuracy 1' and 'accuracy 2'" in words


def test_other_numbers_of_fits_are_a_difference_and_shared_fits_are_compared(repeat):
    status, out, _ = repeat("for value in (7, run)[-run:]: train(value)", "-n", "3")
    assert status == 1
    assert "Run 1 left 1 ledger, run 2 left 2:\n  reference: fit-000\n" in out
    assert "  this run:  fit-000, fit-001\nThe ledgers that both left were compared.\n" in out
    assert "different: 2 of 3 runs differ from run 1" in out
    assert "Run 2, fit 1" in out
    assert ["".join(line.split()[:2]) for line in rows(out)] == ["11", "21", "22", "31", "32"]
    assert rows(out)[2].split()[-2:] == ["no", "match"]


def test_nothing_is_overwritten(repeat, tmp_path):
    repeat("train()")
    repeat("train()")
    assert sorted(p.name for p in (tmp_path / "d9m-runs").glob("[0-9]*")) == ["000", "001"]
    (tmp_path / "mine").mkdir()
    status, _, err = repeat("train()", "-o", "mine")
    assert status == 2
    assert "mine exists already, and nothing is overwritten" in err


@pytest.mark.parametrize(
    ("argv", "expected", "message"),
    [
        (["--", "./train.py"], 3, "Start a script with its interpreter: python ./train.py."),
        (["--", "python train.py"], 3, "without quotes around them all: -- python train.py"),
        (["--", "bad\0name"], 3, "does not start: embedded null"),
        (["-o", "new\0folder", "--", "true"], 2, "cannot be made: embedded null"),
        (["-o", "/proc/x", "--", "true"], 2, "No such file or directory. Check the path. Give"),
        (
            ["--allow-objects", "--", "true"],
            2,
            "--allow-objects has no effect here: only --interrupt",
        ),
        (["-n", "2", "much", "--", "true"], 2, "d9m repeat: error: unrecognized arguments: much"),
        (["--", "true"], 3, "'true' ended well but wrote no ledger"),
        (["--timeout", "0.3", "--", "sleep", "60"], 3, "still running after 0.3 s"),
    ],
)
def test_misuse_is_one_clear_error(argv, expected, message, tmp_path, monkeypatch, d9m):
    """Only a command that started takes a number."""
    monkeypatch.chdir(tmp_path)
    status, _, error = d9m("repeat", *argv)
    assert status == expected
    assert error.count(": error:") == 1
    assert message in error
    started = argv[-1] in ("true", "60") and expected == 3
    assert [path.name for path in tmp_path.glob("d9m-runs/[0-9]*")] == ["000"] * started


def test_the_log_of_a_failed_run_says_more_than_its_ledger(repeat):
    """As on a full disk: the ledger has not even a header."""
    empty = "train()\nnext(ledgers.glob('*/*')).write_text('')\n"
    status, _, err = repeat(f"{empty}sys.exit('No space left on device')")
    assert (status, "| No space left on device" in err) == (3, True)
    assert "the run was killed" not in err
    assert repeat(f"{empty}")[0] == 2


def test_a_failing_run_leaves_its_log_and_its_ledger(repeat, tmp_path):
    code = "train()\nprint('so far so good')\nsys.exit(run - 1)"
    status, _, err = repeat(code)
    assert status == 3
    assert "| so far so good" in err
    assert "error: In run 2 of 2 (run 1 succeeded): The command" in err
    assert "run 2 of 2: stopped" in err
    (log,) = tmp_path.glob("d9m-runs/000/run-002/output.log")
    assert log.read_text() == "so far so good\n"
    assert list(tmp_path.glob("d9m-runs/000/run-002/fit-000/rank-0.jsonl"))


@pytest.mark.parametrize("end", ["sys.exit('boom')", "os.kill(os.getppid(), 15); time.sleep(60)"])
@pytest.mark.parametrize(("value", "status"), [("run", 1), ("7", 3)])
def test_what_runs_have_shown_is_said_when_a_later_one_does_not_end(repeat, end, value, status):
    """Either it fails, or the command gets SIGTERM."""
    found, out, err = repeat(f"if run == 3: {end}\ntrain({value})", "-n", "4")
    is_failure = "boom" in end
    assert found == (status if is_failure else 143)
    assert ("error: In run 3 of 4 (run 2 succeeded)" in err) == is_failure
    said = "different: 1 of 2 runs differs" if status == 1 else "incomplete: the fits of 2 runs"
    assert out.startswith(said)


@pytest.mark.parametrize(("given", "expected"), [("random", "0"), ("5", "5")])
def test_runs_start_with_a_fixed_hash_seed(repeat, tmp_path, monkeypatch, given, expected):
    monkeypatch.setenv("PYTHONHASHSEED", given)
    repeat("train()\nprint(os.environ['PYTHONHASHSEED'])")
    (log,) = tmp_path.glob("d9m-runs/000/run-001/output.log")
    assert log.read_text() == f"{expected}\n"


# What each rank of a training with logical ranks does.
RANK = "train(stack={'world.size': size, 'world.logical_ranks': 4})"


def test_one_table_shows_that_runs_on_other_numbers_of_processes_agree(repeat):
    status, out, err = repeat(RANK, "--processes", "1,2,4")
    assert status == 0
    lines = [line.split() for line in out.split("\n\n")[1].splitlines()]
    assert lines[0] == ["run", "processes", "time", "records", "weights", "verdict"]
    assert [line[:2] for line in lines[1:4]] == [["1", "1"], ["2", "2"], ["3", "4"]]
    assert [line[4:] for line in lines[2:4]] == [["5", "0" * 16, "equal"]] * 2
    assert "equal: the fits of 3 runs agree bit for bit in 5 records each." in out
    assert "run 2 of 3, on 2 processes: done, 1 epoch\n" in err


def test_without_logical_ranks_nothing_is_promised(repeat):
    status, out, _ = repeat("train()", "--processes", "1,3")
    assert status == 1
    assert "world_size" in out
    text = " ".join(out.split())
    assert "The runs have no logical ranks. Without them, the same bits on different" in text
    assert 'the strategy "ddp_d9m", and set LIGHTNING_D9M_LOGICAL_RANKS=4 before' in text
    # On one number of processes the runs may well agree.
    assert "  d9m report " in out
    assert "  d9m locate" not in out


def test_processes_have_the_variables_of_torchrun_and_one_number_of_threads(
    repeat, tmp_path, monkeypatch
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"]
    names += ["OMP_NUM_THREADS", "PL_TRAINER_DEVICES"]
    code = f"\nprint(json.dumps({{n: os.environ[n] for n in {names}}}))"
    assert repeat(RANK + code, "--processes", "2,4")[0] == 0
    run = tmp_path / "d9m-runs" / "000" / "run-001"
    own, other = (json.loads((run / log).read_text()) for log in ("output.log", "output-1.log"))
    assert (own["RANK"], own["LOCAL_RANK"], other["RANK"]) == ("0", "0", "1")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "PL_TRAINER_DEVICES"):
        assert own[name] == other[name] == "2"
    assert own["MASTER_PORT"] == other["MASTER_PORT"]
    assert own["OMP_NUM_THREADS"] == "1"


def test_a_command_may_start_the_processes_itself(repeat, tmp_path):
    code = "assert 'RANK' not in os.environ\nsize = int(sys.argv[1].removeprefix('-np='))\n" + RANK
    status, out, _ = repeat(code, "--processes", "1,2", words=["-np={processes}"])
    assert status == 0
    assert [line.split()[1] for line in rows(out)[:2]] == ["1", "2"]


def test_all_processes_end_when_one_fails_and_its_error_is_shown(repeat):
    # Rank 0 would sleep for ten minutes.
    code = "if rank == 1: sys.exit('the batch is bad')\n"
    status, _, err = repeat(code + "time.sleep(600)", "--processes", "2,1")
    assert status == 3
    assert "error: In run 1 of 2, on 2 processes: The command" in err
    assert "ended with exit status 1 in process 1 of 2. Log: " in err
    assert err.rstrip().endswith("| the batch is bad")


def test_a_process_that_hangs_is_shown(repeat, tmp_path, monkeypatch):
    """The time passes at once when rank 0 has ended."""
    ended = []

    def read_clock():
        if ended:
            return 2.0
        with suppress(OSError, ValueError):
            ended.extend([True] * has_ended(int((tmp_path / "pid").read_text()), seconds=0))
        return 0.0

    monkeypatch.setattr(processes, "_read_clock", read_clock)
    code = "if rank == 1: signal.pause()\n"
    code += f"Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))"
    _, _, err = repeat(code, "--processes", "2,1", "--timeout", "1")
    assert "was still running in process 1 of 2 after 1 s" in err
    assert "output-1.log" in err


@pytest.fixture
def resume(repeat):
    """Return a function that repeats a program with --interrupt."""
    return lambda code, *options, **words: repeat(code, "--interrupt", *options, **words)


def test_each_point_gets_a_segment_that_resumes_there(resume, tmp_path):
    status, out, err = resume("train()")
    assert status == 0
    said = "equal: 2 of 2 segments that resume from checkpoints of the run are equal to it."
    assert said in " ".join(out.split())
    assert [" ".join(line.split()) for line in rows(out)] == [
        "1 after a step 1 to 4 equal",
        "2 between accumulated batches 1 to 4 equal",
    ]
    assert "segment 2 (2 of 2): done, 1 epoch" in err
    assert max(map(len, [*out.splitlines()[:-1], *err.splitlines()])) <= 80
    assert not list(tmp_path.glob("d9m-runs/000/*/checkpoints"))
    assert re.search(r"segment 1 \(1 of 2\): started, about \d+ s left", err)


def test_a_segment_that_differs_is_run_again_and_its_checkpoint_kept(resume, tmp_path):
    status, out, _ = resume("train(8 if 'accumulated' in str(resume) else 7)")
    assert status == 1
    assert [line.split()[-1] for line in rows(out)[:1]] == ["equal"]
    assert "persistent" in rows(out)[1]
    assert out.startswith("different: 1 of 2 segments")
    assert "the checkpoint lacks state that the training uses" in " ".join(out.split())
    assert "d9m locate" not in out  # straight runs agree
    (kept,) = tmp_path.glob("d9m-runs/000/*/checkpoints/*")
    assert kept.name == "accumulated-1.ckpt"


def test_a_program_that_varies_is_told_from_a_checkpoint_that_lacks_state(resume):
    status, out, _ = resume("train(9 if 'again' in ledgers.name else 8 if resume else 7)")
    assert status == 1
    assert "program" in rows(out)[0]
    assert "d9m locate -- " in out


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("points = []; train()", "no point from which it can be resumed"),
        ("assert not request, 'too early'; train()", "| AssertionError: too early"),
    ],
)
def test_a_command_that_cannot_be_tested_is_one_clear_error(resume, code, message):
    status, out, err = resume(code)
    assert status == 3
    assert not out
    assert err.count("d9m: error:") == 1
    assert message in " ".join(err.split())


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("train(obeys=False)", "did not reach step"),
        ("assert not resume, 'no way'; train()", "| AssertionError: no way"),
        ("if not resume: train()", "wrote no ledger"),
    ],
)
def test_points_that_fail_are_all_reported(resume, code, message):
    status, out, err = resume(code)
    assert (status, "d9m: error:" in err) == (3, False)
    assert out.startswith("incomplete: 0 of 2 segments")
    assert re.findall(r"^Segment (\d+): ", out, re.MULTILINE) == [*"12"]
    assert " ".join(out.split()).count(message) == 2


FAIL_ONCE = "assert 'step-1' not in str(resume), {cause!r}\n"


def test_a_difference_outweighs_a_failure(resume):
    status, out, _ = resume(FAIL_ONCE.format(cause="why") + "train(8 if resume else 7)")
    assert status == 1
    assert out.startswith("different: 0 of 2 segments")
    assert [line.split("1 to 4")[1].split()[0] for line in rows(out)] == ["failed", "persistent"]


@pytest.mark.parametrize(
    ("cause", "advice"),
    [
        ("Weights only load failed.", "add --allow-objects, or call fit(..., weights_only=False)"),
        ("something else", None),
    ],
)
def test_a_point_that_fails_leaves_the_verdicts_of_the_others(resume, cause, advice):
    status, out, _ = resume(FAIL_ONCE.format(cause=cause) + "train()")
    assert status == 3
    # The checkpoints of all points hold objects: no other point is tried.
    tried = ["failed"] if "only" in cause else ["failed", "equal"]
    assert [line.split()[-1] for line in rows(out)] == tried
    assert f"| AssertionError: {cause}" in out
    assert out.startswith("incomplete: ")
    assert " ".join(out.split()).count(str(advice)) == (advice is not None)


def test_objects_in_checkpoints_are_named_above_the_end_of_a_log(resume):
    prints = "import atexit\natexit.register(print, *'x' * 30, sep='\\n')\n"
    _, out, _ = resume(prints + FAIL_ONCE.format(cause="Weights only load failed.") + "train()")
    assert "add --allow-objects" in " ".join(out.split())


EVALUATE = """
import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_d9m import DeterminismCallback
words = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
L.Trainer(callbacks=[DeterminismCallback()], **words).test(BoringModel())
"""


def test_a_program_that_only_evaluates_has_no_point(resume):
    status, _, errors = resume(EVALUATE)
    assert status == 3
    assert "The command wrote no ledger of a fit." in errors


def test_the_advice_on_objects_is_found_by_words_of_the_real_error(tmp_path):
    path = tmp_path / "object.ckpt"
    torch.save({"loop": D9mError()}, path)
    with pytest.raises(UnpicklingError, match=_OBJECTS.decode()):
        torch.load(path)


@pytest.mark.parametrize("options", [(), ("--allow-objects",)])
def test_objects_are_allowed_in_resumed_runs_only(resume, tmp_path, monkeypatch, options):
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    resume("print(*map(os.environ.get, FORCE)); train()".replace("FORCE", repr(FORCE)), *options)
    logs = {path.parent.name: path.read_text() for path in tmp_path.rglob("output.log")}
    assert len(logs) == 3
    for name, text in logs.items():
        assert text == ("0 1\n" if options and name != "run-001" else "1 None\n")


@pytest.fixture
def interrupt(tmp_path, forking_python):
    """Return a function that repeats a real program with --interrupt: the process, its result."""

    def run(program):
        script = tmp_path / "train.py"
        script.write_text(program)
        words = ("-m", "lightning_d9m", "repeat", "--interrupt", "--json", "--")
        command = (forking_python, *words, forking_python, script)
        done = execute(*command, folder=tmp_path, fails=True, OMP_NUM_THREADS="1")
        return done, json.loads(done.stdout or "{}")

    return run


# A project that does not mention lightning_d9m. With `hidden`, its training counts in a variable of
# the environment, which no checkpoint holds, besides drawing from an iterator, which it does hold.
TRAINING = """
import os
import sys
sys.path.insert(0, {support!r})
import lightning.pytorch as L
import numpy as np
from trainings import QUIET, make_loader, make_model

def count():
    os.environ["STEPS"] = str(int(os.environ.get("STEPS", 0)) + {hidden})
    return int(os.environ["STEPS"])

draws = iter(np.random.default_rng(0).random, None)
model = make_model()
step = model.training_step
model.training_step = lambda *batch: step(*batch) * (1 + next(draws) + count())
trainer = L.Trainer(max_epochs=1, accumulate_grad_batches=2, num_sanity_val_steps=0, **QUIET)
trainer.fit(model, make_loader())
"""


@pytest.mark.parametrize(("hidden", "verdict"), [(False, "equal"), (True, "different")])
def test_a_real_project_is_tested_unchanged(interrupt, hidden, verdict):
    """All of its state is restored; what cannot be restored makes runs differ."""
    done, result = interrupt(TRAINING.format(hidden=hidden, support=str(SUPPORT)))
    assert result.get("verdict") == verdict, done.stderr
    assert done.returncode == (verdict != "equal")
    assert [own["verdict"] for own in result["checked"]] == (
        ["persistent"] if hidden else ["equal"]
    ) * 2


SAVING = """
import sys
sys.path.insert(0, {support!r})
import lightning.pytorch as L
from trainings import QUIET, make_loader, make_model

saving = L.callbacks.ModelCheckpoint(
    "saved", every_n_train_steps=1, save_top_k=-1, save_weights_only={weights}
)
words = QUIET | {{"enable_checkpointing": True, "callbacks": [saving]}}
L.Trainer(max_epochs=1, **words).fit(make_model(), make_loader())
"""


@pytest.mark.parametrize("weights", [False, True])
def test_the_checkpoints_of_the_program_itself_are_tried(interrupt, weights):
    """No training continues from weights alone."""
    done, result = interrupt(SAVING.format(weights=weights, support=str(SUPPORT)))
    assert (done.returncode, result.get("verdict")) == (0, "equal"), done.stderr
    own = [own["first"] for own in result["checked"] if own["label"] == "by the program"]
    assert len(own) == (0 if weights else 3)
    assert own[:1] == [1][: len(own)]
