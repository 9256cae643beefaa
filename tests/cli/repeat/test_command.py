"""``d9m repeat`` compares runs and names every way in which a command can fail."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_d9m.cli.main import main

EXAMPLES = Path(__file__).parents[3] / "examples"

# A command that writes ledgers as a training does, without importing torch.
RUN = """
import os, sys
from pathlib import Path
from lightning_d9m.ledger.format.writer import LedgerWriter
from lightning_d9m.ledger.folder import create_ledger_folder, rank_path
from lightning_d9m.ledger.format.records import Digests, End, Header, RunFacts

for seed, value in {fits!r}:
    folder = create_ledger_folder(Path(os.environ["LIGHTNING_D9M_LEDGER_DIR"]))
    with LedgerWriter(rank_path(folder, 0)) as ledger:
        ledger.write(Header(rank=0, world_size=1, fit=0, seed=seed, created="", package="0",
                            settings={{}}, stack={{}}).as_record())
        ledger.write(RunFacts(model="m", parameters=1, train=[]).as_record())
        digest = f"{{value:032x}}"
        for moment in ("initial", "epoch", "final"):
            ledger.write(Digests(moment=moment, epoch=0, step=0, totals={{"weights": digest}},
                                 groups={{"weights": {{"w": digest}}}},
                                 loss=(0.1).hex()).as_record())
        ledger.write(End(status="finished").as_record())
"""
# The number of the run, from the folder that the command was given.
NUMBER = 'int(os.environ["LIGHTNING_D9M_LEDGER_DIR"][-3:])'


@pytest.fixture
def repeat(tmp_path, monkeypatch, capsys):
    """Return a function that repeats Python code; it gives (status, output, errors)."""
    monkeypatch.chdir(tmp_path)

    def run(code, *options, n=2):
        script = tmp_path / "script.py"
        script.write_text(code)
        status = main(["repeat", "-n", str(n), *options, "--", sys.executable, str(script)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def fits(*values, seed=42):
    """Return code that leaves one ledger for each expression that gives its digest."""
    pairs = ", ".join(f"({seed}, {value})" for value in values)
    return RUN.format(fits=0).replace("in 0:", f"in [{pairs}]:")


def table_rows(output):
    """Return the lines of the table, which stands below the verdict."""
    return output.split("\n\n")[1].splitlines()[1:]


def test_equal_runs(repeat):
    status, out, err = repeat(fits(7), n=3)
    assert status == 0
    assert "equal: the fits of 3 runs agree bit for bit in 5 records each." in out
    assert [line.split()[-1] for line in table_rows(out)] == ["reference", "equal", "equal"]
    assert "run 2 of 3: done, 1 epoch\n" in err


def test_a_run_that_differs_is_named_with_the_first_divergence(repeat):
    status, out, _ = repeat(fits(f"1 if {NUMBER} == 2 else 7"), n=3)
    assert status == 1
    assert [line.split()[-1] for line in table_rows(out)] == ["reference", "differs", "equal"]
    assert "Rank 0 diverges first, in the initial state." in " ".join(out.split())
    assert out.startswith("different: 1 of 3 runs differs from run 1. Run 2: ")
    assert "  d9m locate --tries 4 -- " in out
    assert (
        max(len(line) for line in out.splitlines() if not re.search("d9m-runs|  d9m", line)) <= 80
    )


def test_last_bits_are_changed_in_each_run_but_the_first_or_it_is_an_error(repeat, tmp_path):
    """The program notes what is set; it has no Trainer, which would change the weights."""
    note = "import os; open('noted', 'a').write(os.environ.get('LIGHTNING_D9M_LAST_BITS', '-'))\n"
    status, _, err = repeat(note + fits(7), "--last-bits", n=3)
    assert status == 2
    assert "left the last bits of its weights alone: --last-bits needs a Trainer" in err
    assert (tmp_path / "noted").read_text() == "-12"
    changed = fits(NUMBER).replace("settings={}", f"settings={{'last_bits': {NUMBER}}}")
    status, out, _ = repeat(changed, "--last-bits", n=3)
    assert status == 1
    assert "d9m compare BEFORE AFTER --noise d9m-runs/001" in out
    status, _, err = repeat(fits(7), "--last-bits", "--interrupt")
    assert status == 2
    assert "--last-bits is given with --portable, --processes or --interrupt" in err


def test_json(repeat):
    status, out, _ = repeat(fits(f"{NUMBER}"), "--json")
    result = json.loads(out)
    assert status == 1
    assert result["verdict"] == "different"
    assert [run["loss_hex"] for run in result["runs"]] == [(0.1).hex()] * 2
    assert result["differing"][0]["comparison"]["verdict"] == "different"
    assert json.loads(repeat(fits(7), "--json")[1])["verdict"] == "equal"


def test_markdown(repeat):
    status, out, _ = repeat(fits(f"{NUMBER}"), "--format", "markdown")
    assert status == 1
    assert out.startswith("**different**: 1 of 2 runs differs from run 1. ")
    assert "\n| run | seed | weights | final loss | verdict |\n| --- |" in out
    assert out.count("```") == 2
    assert repeat(fits(7), "--format", "markdown")[1].startswith("**equal**: the fits of 2")


def test_several_fits_are_compared_one_by_one(repeat):
    status, out, _ = repeat(fits(7, f"{NUMBER}"))
    assert status == 1
    assert "differs from run 1. Run 2, fit 2: " in out


@pytest.mark.parametrize(
    ("value", "said", "advised"),
    [
        (f"{NUMBER} // 3", "1 of 2 pairs differ, so one pair of runs may miss it.", "--tries 4 --"),
        (f"min(2, {NUMBER})", "look for files that run 1 left and later runs read", "locate --"),
        (f"{NUMBER}", "", "locate --"),
    ],
)
def test_what_the_runs_together_show_is_said(repeat, value, said, advised):
    out = " ".join(repeat(fits(value), n=3)[1].split())
    assert said in out
    assert f"d9m locate {advised}" in out or f"d9m {advised}" in out
    assert ("pairs differ" in out, "run 1 left and" in out) == ("pairs" in said, "files" in said)


def test_files_that_carry_a_difference_from_run_to_run_are_named(repeat):
    count = "Path('count').open('a').write('x')\nseen = Path('count').stat().st_size\n"
    code = "from pathlib import Path\n" + count + fits("seen")
    assert "a later one: count.\n" in repeat(code)[1]
    left = json.loads(repeat(code, "--json")[1])["left"]
    assert left == ["Files written in one run and read or written in a later one: count."]
    assert left[0] in repeat(code, "--format", "markdown")[1]
    assert "Files" not in repeat(code.replace("'a'", "'w'"))[1]  # the runs are equal


@pytest.mark.parametrize(
    ("printed", "noted"),
    [
        (f'"accuracy", {NUMBER}', True),
        (f'"took", {NUMBER}, "s"', False),
        ('"the same"', False),
    ],
)
def test_equal_fits_of_a_program_that_prints_other_results(repeat, printed, noted):
    status, out, _ = repeat(f"{fits(7)}\nprint({printed})")
    assert status == 0
    words = " ".join(out.split())
    assert ("note: the runs printed different output" in words) == noted
    assert not noted or "such as 'accuracy 1' and 'accuracy 2'" in words


def test_all_fits_count_as_records(repeat):
    assert "agree bit for bit in 10 records each" in repeat(fits(7, 8))[1]


@pytest.mark.parametrize(("values", "seen"), [((7, 7), ""), ((7, f"{NUMBER}"), "Run 2, fit 1")])
def test_other_numbers_of_fits_are_a_difference_and_shared_fits_are_compared(repeat, values, seen):
    code = fits(*values).replace("]:", f"][-{NUMBER}:]:")
    status, out, _ = repeat(code, n=3)
    assert status == 1
    assert "Run 1 left 1 ledger, run 2 left 2:\n  reference: fit-000\n" in out
    assert "  this run:  fit-000, fit-001\nThe ledgers that both left were compared.\n" in out
    assert "different: 2 of 3 runs differ from run 1" in out
    assert "0 of" not in out
    assert seen in out
    assert [line.split()[0] for line in table_rows(out)] == ["1.1", "2.1", "2.2", "3.1", "3.2"]
    assert table_rows(out)[2].split()[-2:] == ["no", "match"]


def test_nothing_is_overwritten(repeat, tmp_path):
    repeat(fits(7))
    repeat(fits(7))
    assert sorted(p.name for p in (tmp_path / "d9m-runs").iterdir()) == ["000", "001"]
    (tmp_path / "mine").mkdir()
    status, _, err = repeat(fits(7), "-o", "mine")
    assert status == 2
    assert "mine exists already, and nothing is overwritten" in err


def test_an_output_that_cannot_be_made(repeat, tmp_path):
    (tmp_path / "file").write_text("")
    status, _, err = repeat(fits(7), "-o", "file/below")
    assert status == 2
    assert "file/below cannot be made: Not a directory" in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--", __file__], "does not start: Permission denied"),
        (["--", "./train.py"], "Start a script with its interpreter: python ./train.py."),
        (["--", "bad\0name"], "does not start: embedded null"),
        (["-o", "new\0folder", "--", "true"], "cannot be made: embedded null"),
        (["--allow-objects", "--", "true"], "--allow-objects is only for --interrupt"),
        (["--", "true"], "'true' ended well but wrote no ledger"),
        (["--", "false"], "'false' ended with exit status 1"),
        (["--", "no-such-program"], "does not start: No such file"),
        (["--timeout", "0.3", "--", "sleep", "60"], "still running after 0.3 s"),
    ],
)
def test_misuse_is_one_clear_error(argv, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["repeat", *argv]) == 2
    error = capsys.readouterr().err
    assert error.count("d9m: error:") == 1
    assert message in error


def test_a_disk_that_is_full_is_one_clear_error(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    original = Path.mkdir

    def mkdir(path, *arguments, **words):
        if path.name == "run-001":
            raise OSError(28, "No space left on device")
        original(path, *arguments, **words)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert main(["repeat", "--", "true"]) == 2
    assert "run-001 cannot be made: No space left on device. Free some" in capsys.readouterr().err


def test_a_ledger_that_cannot_be_read_is_named(repeat, tmp_path):
    code = fits(7) + "\nrank_path(folder, 0).write_bytes(b'{')"
    status, _, err = repeat(code)
    assert status == 2
    assert "run-001/fit-000/rank-0.jsonl is not a ledger" in err


def test_a_ledger_cut_short_is_no_agreement(repeat):
    cut = "\nif {} == 2: os.truncate(rank_path(folder, 0), rank_path(folder, 0).stat().st_size - 5)"
    status, out, _ = repeat(fits(7) + cut.format(NUMBER))
    assert status == 1
    assert "this run was ended before it finished its ledger" in " ".join(out.split())


def test_a_failing_run_leaves_its_log_and_its_ledger(repeat, tmp_path):
    code = fits(7) + f"\nprint('so far so good')\nsys.exit({NUMBER} - 1)"
    status, _, err = repeat(code)
    assert status == 2
    assert "| so far so good" in err
    assert "error: In run 2 of 2 (run 1 succeeded): The command" in err
    assert "run 2 of 2: stopped" in err
    (log,) = tmp_path.glob("d9m-runs/000/run-002/output.log")
    assert log.read_text() == "so far so good\n"
    assert list(tmp_path.glob("d9m-runs/000/run-002/fit-000/rank-0.jsonl"))


@pytest.mark.parametrize(("given", "expected"), [(None, "0"), ("random", "0"), ("5", "5")])
def test_runs_start_with_a_fixed_hash_seed(repeat, tmp_path, monkeypatch, given, expected):
    if given is None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    else:
        monkeypatch.setenv("PYTHONHASHSEED", given)
    repeat(fits(7) + "\nprint(os.environ['PYTHONHASHSEED'])")
    (log,) = tmp_path.glob("d9m-runs/000/run-001/output.log")
    assert log.read_text() == f"{expected}\n"


def repeat_example(python, name, *options, runs, cwd):
    """Run ``d9m repeat`` on an example as a user does, and return its output."""
    # The suite may run with one thread, which would leave nothing to race.
    done = subprocess.run(
        [
            *(python, "-m", "lightning_d9m", "repeat", "-n", str(runs), "--"),
            *(python, EXAMPLES / name, "--epochs", "1", *options),
        ],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    # Where the runs differ, the divergence is on standard output.
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_main_job(tmp_path, forking_python):
    """Train the digits network of the examples twice, with loader workers, and agree."""
    output = repeat_example(forking_python, "digits.py", "--workers", "1", runs=2, cwd=tmp_path)
    assert "equal: the fits of 2 runs agree bit for bit" in output


def test_a_real_nondeterministic_operation_agrees_with_the_callback(tmp_path, forking_python):
    """Pooling over graph edges by ``index_put_``; test_examples shows that it differs without."""
    output = repeat_example(forking_python, "graph.py", runs=2, cwd=tmp_path)
    assert "equal: the fits of 2 runs agree bit for bit" in output
