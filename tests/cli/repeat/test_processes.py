"""``d9m repeat --processes`` runs a command on several numbers of processes and compares."""

import json
import sys
from contextlib import suppress

import pytest
from process_end import has_ended

from lightning_d9m.cli.main import main
from lightning_d9m.launch import processes

# Writes the ledger that rank 0 of a training writes, without importing torch.
RANK = """
import os, sys
from pathlib import Path
from lightning_d9m.ledger.format.writer import LedgerWriter
from lightning_d9m.ledger.folder import create_ledger_folder, rank_path
from lightning_d9m.ledger.format.records import Digests, End, Header, RunFacts

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if rank == 0:
    folder = create_ledger_folder(Path(os.environ["LIGHTNING_D9M_LEDGER_DIR"]))
    with LedgerWriter(rank_path(folder, 0)) as ledger:
        stack = {{"world.size": size, **{stack}}}
        ledger.write(Header(rank=0, world_size=size, fit=0, seed=1, created="", package="0",
                            settings={{}}, stack=stack).as_record())
        ledger.write(RunFacts(model="m", parameters=1, train=[]).as_record())
        digest = f"{{{value}:032x}}"
        for moment in ("initial", "epoch", "final"):
            ledger.write(Digests(moment=moment, epoch=0, step=0, totals={{"weights": digest}},
                                 groups={{"weights": {{"w": digest}}}}).as_record())
        ledger.write(End(status="finished").as_record())
"""
LOGICAL = {"world.logical_ranks": 4}


@pytest.fixture
def repeat(tmp_path, monkeypatch, capsys):
    """Return a function that runs Python code on numbers of processes."""
    monkeypatch.chdir(tmp_path)

    def run(code, counts, *options, words=()):
        script = tmp_path / "script.py"
        script.write_text(code)
        command = [sys.executable, str(script), *words]
        status = main(["repeat", "--processes", counts, *options, "--", *command])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def rank(value=7, stack=LOGICAL):
    return RANK.format(value=value, stack=stack)


def test_one_table_shows_that_runs_on_other_numbers_of_processes_agree(repeat):
    status, out, err = repeat(rank(), "1,2,4")
    assert status == 0
    lines = [line.split() for line in out.split("\n\n")[1].splitlines()]
    assert lines[0] == ["run", "processes", "time", "records", "weights", "verdict"]
    assert [line[:2] + line[4:] for line in lines[1:4]] == [
        ["1", "1", "5", "0" * 16, "reference"],
        ["2", "2", "5", "0" * 16, "equal"],
        ["3", "4", "5", "0" * 16, "equal"],
    ]
    assert "equal: the fits of 3 runs agree bit for bit in 5 records each." in out
    assert "run 2 of 3, on 2 processes: done, 1 epoch\n" in err


def test_a_difference_is_found_and_named(repeat):
    status, out, _ = repeat(rank("7 + size // 2"), "4,1,5", "--json")
    result = json.loads(out)
    assert status == 1
    assert [run["processes"] for run in result["runs"]] == [4, 1, 5]
    assert [run["verdict"] for run in result["runs"]] == ["reference", "differs", "equal"]
    assert all(run["seconds"] > 0 for run in result["runs"])
    assert [entry["run"] for entry in result["differing"]] == [2]


def test_without_logical_ranks_nothing_is_promised(repeat):
    status, out, _ = repeat(rank(stack={}), "1,3")
    assert status == 1
    assert "world_size" in out
    text = " ".join(out.split())
    assert "The runs have no logical ranks. Without them, the same bits on different" in text
    assert 'the strategy "ddp_d9m", and set LIGHTNING_D9M_LOGICAL_RANKS=4 before' in text


def test_processes_have_the_variables_of_torchrun_and_one_number_of_threads(
    repeat, tmp_path, monkeypatch
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    names += ["OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID", "LIGHTNING_D9M", "PYTHONHASHSEED"]
    names += ["PL_TRAINER_DEVICES"]
    code = f"\nimport json\nprint(json.dumps({{n: os.environ[n] for n in {names}}}))"
    assert repeat(rank() + code, "2,8")[0] == 0
    run = tmp_path / "d9m-runs" / "000" / "run-001"
    own, other = (json.loads((run / log).read_text()) for log in ("output.log", "output-1.log"))
    assert (own["RANK"], own["LOCAL_RANK"], other["RANK"]) == ("0", "0", "1")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "PL_TRAINER_DEVICES"):
        assert own[name] == other[name] == "2"
    assert own["MASTER_PORT"] == other["MASTER_PORT"]
    assert own["OMP_NUM_THREADS"] == "1"


def test_a_command_may_start_the_processes_itself(repeat, tmp_path):
    code = "import os, sys\nassert 'RANK' not in os.environ\n"
    code += "os.environ.update(RANK='0', WORLD_SIZE=sys.argv[1].removeprefix('-np='))\n"
    status, out, _ = repeat(code + rank(), "1,2", words=["-np={processes}"])
    assert status == 0
    assert [line.split()[1] for line in out.split("\n\n")[1].splitlines()[1:3]] == ["1", "2"]


def test_all_processes_end_when_one_fails_and_its_error_is_shown(repeat):
    # Rank 0 would sleep for ten minutes.
    code = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('the batch is bad')\n"
    status, _, err = repeat(code + "time.sleep(600)", "2,1")
    assert status == 2
    assert "error: In run 1 of 2, on 2 processes: The command" in err
    assert "ended with exit status 1 in process 1 of 2. Log: " in err
    assert err.rstrip().endswith("| the batch is bad")


def test_the_process_that_failed_first_is_shown(repeat, monkeypatch):
    # Rank 1 fails; rank 0 fails because of that, and ends before rank 1 does.
    monkeypatch.setattr(processes, "_SETTLE_SECONDS", 60.0)  # a busy machine is slow
    code = (
        "import os, time\nfrom pathlib import Path\nrank = int(os.environ['RANK'])\n"
        "while rank == 0 and not Path('failed').exists(): time.sleep(0.01)\n"
        "time.sleep(0.1 * (rank == 0))\n"  # more than the clock of a file system needs to advance
        "print('error of', rank, flush=True)\n"
        "if rank == 1: Path('failed').touch(); time.sleep(0.3)\n"
        "os._exit(1)"
    )
    assert "| error of 1" in repeat(code, "2,1")[2]


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
    code = "import os, signal\nfrom pathlib import Path\n"
    code += "if os.environ['RANK'] == '1': signal.pause()\n"
    code += f"Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))"
    _, _, err = repeat(code, "2,1", "--timeout", "1")
    assert "was still running in process 1 of 2 after 1 s" in err
    assert "output-1.log" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["0,1"], "0,1 is not valid; allowed: whole numbers from 1 to 1024"),
        (["1,two"], "1,two is not valid; allowed: whole numbers from 1 to 1024"),
        (["1,,2"], "1,,2 is not valid; allowed: whole numbers"),
        (["-1,2"], "expected one argument"),
        (["1,2,1"], "1,2,1 is not valid; a number occurs twice"),
        (["2"], "2 is not valid; one run cannot be compared"),
        (["1,2", "--interrupt"], "--processes is 1,2, and --interrupt is given too"),
        (["1,2", "-n", "2"], "--processes is 1,2, and --runs is given too"),
        (["1,8"], "--processes is 1,8, but LIGHTNING_D9M_LOGICAL_RANKS is 4"),
    ],
)
def test_wrong_input_is_one_clear_error(options, message, monkeypatch, capsys):
    monkeypatch.setenv("LIGHTNING_D9M_LOGICAL_RANKS", "4")
    try:
        status = main(["repeat", "--processes", *options, "--", "true"])
    except SystemExit as ended:  # argparse
        status = ended.code
    assert status == 2
    error = capsys.readouterr().err
    assert error.count("error:") == 1
    assert message in error
