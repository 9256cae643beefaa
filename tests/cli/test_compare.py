"""``d9m compare``: what it prints, its exit status, and that it needs no torch."""

import json
import math
import subprocess
import sys

import pytest
from ledger_runs import make_facts, make_probes, make_weights, write_rank

from lightning_d9m.engine.ledger.folder import create_ledger_folder, rank_path
from lightning_d9m.engine.ledger.format.records import Evaluation

NAMES = [f"encoder.layers.{number}.attention.projection.weight" for number in range(12)]


def write(parent, *, epochs=2, drift=None, world_size=1, end="finished", scalars=(), **changes):
    """Write a run; from epoch ``drift`` on, all weights of the last rank are others."""
    folder = create_ledger_folder(parent)
    changes = {"stack": {"device.driver": "560.35.03"}} | changes
    for rank in range(world_size):
        records = [make_facts()]
        for epoch in range(-1, epochs):
            differs = rank == world_size - 1 and drift is not None and epoch >= drift
            records.append(
                make_weights(
                    "epoch" if epoch >= 0 else "initial",
                    max(epoch, 0),
                    dict.fromkeys(NAMES, ("f" if differs else "0") * 32),
                    step=23 * (epoch + 1),
                    loss=(0.1 if differs else 0.2).hex(),
                    scalars=dict(scalars) if epoch >= 0 else {},
                )
            )
        write_rank(folder, records, rank=rank, end=end, world_size=world_size, **changes)
    return folder


@pytest.fixture
def compare(d9m):
    """Return a function that runs the command in this process; it gives its status and output."""

    def run(*words):
        status, out, err = d9m("compare", *words)
        assert err == ""
        return status, out

    return run


def narrow(output):
    """Return the lines that are not paths or next steps, checked to fit 80 columns."""
    lines = output.partition("\nNext:")[0].splitlines()
    lines = [line for line in lines if not line.startswith(("reference: ", "this run: "))]
    assert max(map(len, lines)) <= 80
    return "\n".join(lines).rstrip()


def test_equal(tmp_path, compare):
    """What was compared is said: never a bare OK."""
    one, other = write(tmp_path), write(tmp_path)
    status, output = compare(one, other)
    assert status == 0
    assert output == (
        "equal: 5 records bit for bit the same (3 of digests; 2 epochs; rank 0).\n\n"
        f"reference: {one}\nthis run:  {other}\n"
    )


def test_different(tmp_path, compare):
    """Rank, epoch, step, groups, names, both values, digests cut."""
    status, output = compare(write(tmp_path, world_size=2), write(tmp_path, world_size=2, drift=1))
    assert status == 1
    text = " ".join(narrow(output).split())
    assert text.startswith("different: 10 records compared. Rank 1 diverges first, in epoch 1 (")
    assert "Rank 1, epoch 1 (step 46): weights: 12 of 12 differ loss: 1 of 1 differ first" in text
    shown = f"reference: {'0' * 16} this run: {'f' * 16} Records that differ: 1 of 5."
    assert text.endswith(f"{NAMES[2]} and 9 more {shown}")


ONCE, AGAIN = ({"scalars": [("val_loss", value.hex())]} for value in (1.5, 2.5))


@pytest.mark.parametrize(
    ("one", "other", "status", "said", "unsaid"),
    [
        ({}, {"drift": -1}, 1, "Seed before the model is built", "IGNORED_METRICS"),
        # How to leave a value out is said where nothing else differs, and only there.
        (ONCE, AGAIN, 1, "LIGHTNING_D9M_IGNORED_METRICS=NAME", "the training differs later"),
        (
            ONCE,
            AGAIN | {"drift": 1},
            1,
            "A logged value differs first, and the training differs later",
            "IGNORED_METRICS",
        ),
        # The bits decide, not the stack.
        ({}, {"stack": {}}, 0, "this run: missing", "different"),
    ],
)
def test_advice(tmp_path, compare, one, other, status, said, unsaid):
    found, output = compare(write(tmp_path, **one), write(tmp_path, **other))
    assert found == status
    text = " ".join(narrow(output).split() + output.split())
    assert said in text
    assert unsaid not in text


def test_what_one_run_lacks_is_said(tmp_path, compare):
    one, other = write(tmp_path, world_size=4), write(tmp_path, world_size=4)
    path = rank_path(other, 2)
    path.write_bytes(path.read_bytes()[:-5])
    rank_path(other, 3).unlink()
    rank_path(one, 1).unlink()
    status, output = compare(one, other)
    assert (status, output.partition(":")[0]) == (1, "different")
    assert "its torn last record was left out" in " ".join(output.split())
    assert "Only the reference has a file of rank 3." in output
    assert "Only this run has a file of rank 1." in output


@pytest.mark.parametrize("command", ["compare", "report", "bundle"])
def test_a_ledger_that_was_cut_off_has_its_own_status(tmp_path, d9m, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    folders = write(tmp_path), write(tmp_path, epochs=1, end="")
    status, out, err = d9m(command, *folders)
    assert (status, out.partition(":")[0], err) == (3, "incomplete", "")


def test_two_runs_that_do_not_say_that_they_ended_are_incomplete(tmp_path, compare):
    folders = [write(tmp_path, world_size=2, end="") for _ in range(2)]
    status, output = compare(*folders)
    text = " ".join(output.split())
    assert (status, text.partition(":")[0]) == (3, "incomplete")
    assert "as far as both runs go; a run was ended before it finished its ledger, as by" in text


def test_a_value_without_a_digest_is_named_in_the_verdict(tmp_path, compare):
    """Its type has the same digest in both runs."""
    where = "optimizers 0.h.weight: value is of type Obj, whose bytes are not defined."
    record = make_weights("epoch", 0, {"w": "0" * 32}, undigested=2, problem=where)
    folders = [write_rank(create_ledger_folder(tmp_path), [record]) for _ in range(2)]
    status, output = compare(*folders)
    text = " ".join(output.split())
    assert (status, text.partition(":")[0]) == (0, "equal")
    assert f"A value was not compared, in epoch 0 (step 9): {where}" in text
    assert "not compared" not in compare(write(tmp_path), write(tmp_path))[1]


def test_the_reason_for_a_missing_digest_is_not_compared(tmp_path, compare):
    """It may show the address of a key."""
    state = make_weights("epoch", 0, {"w": "0" * 32})
    folders = []
    for address in ("0x1", "0x2"):
        fields = {"name": "test", "epoch": 0, "step": 9, "batches": 1, "outputs": "0" * 32}
        problem = f"value[<function f at {address}>] is of type Obj, whose bytes are not defined."
        record = Evaluation(**fields, undigested=1, problem=problem)
        folders.append(write_rank(create_ledger_folder(tmp_path), [record, state]))
    status, output = compare(*folders)
    text = " ".join(output.split())
    assert (status, text.partition(":")[0]) == (0, "equal")
    assert "A value was not compared, in evaluation epoch 0 step 9 name test: value[" in text


def test_nothing_was_proven(tmp_path, compare):
    """Two runs that were killed before the first digest are not called equal."""
    folders = [write(tmp_path, epochs=-1, end="") for _ in range(2)]
    status, output = compare(*folders)
    assert status == 1
    assert "not comparable: a rank has no digests in common" in output
    ranks = [rank_path(write(tmp_path, world_size=2), rank) for rank in range(2)]
    assert "the ledgers have no rank in common" in compare(*ranks)[1]


def test_untrusted_names_are_printed_harmlessly(tmp_path, compare, d9m):
    """A ledger from elsewhere does not move the cursor, nor does the folder that it is in."""
    one = write(tmp_path / "\x1b[2J", stack={"\x1b[2J": "\x1b[31m"})
    text = compare(one, write(tmp_path))[1]
    assert "\x1b" not in text
    assert "\\x1b[2J/fit-000" in text
    status, _, error = d9m("compare", one.parent / "none\u202e", one)
    assert status == 2
    assert "\\x1b[2J/none\\u202e cannot be opened: No such file" in error
    assert not {"\x1b", "\u202e"} & set(error)


def test_of_many_ranks_the_first_is_described(tmp_path, compare):
    """The others in a sentence; the last line says again which was first."""

    def trace(*drift):
        folder = create_ledger_folder(tmp_path)
        names = [("output", f"encoder.layers.{number}") for number in range(4)]
        for rank, first in enumerate(drift):
            rows = [[0, 0, *[255 * (batch >= first)] * 2] for batch in range(3)]
            write_rank(folder, make_probes(names, rows), rank=rank, world_size=8)
        return folder

    one, other = trace(*[3] * 8), trace(2, 2, 2, 1, 2, 2, 3, 1)
    path = rank_path(other, 7)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    text = narrow(compare(one, other)[1])
    assert text == (
        "different: 7 records and 96 probes of 24 batches compared. Ranks 3, 7 diverge\n"
        "first, in batch 1 of epoch 0 (step 1).\n\n\n"
        "Rank 3, batch 1 of epoch 0 (step 1):\n"
        "  output: 2 of 4 differ\n"
        "  first output: encoder.layers.2, encoder.layers.3\n"
        f"    reference: {'0' * 16}\n"
        f"    this run:  {'f' * 16}\n"
        "  Probes that differ: 4 of 12,\n"
        "  in 2 of 3 batches.\n"
        "Rank 7 diverges in batch 1 of epoch 0 (step 1): output encoder.layers.2; 2 of 4\n"
        "differ.\n"
        "Ranks 0-2, 4, 5 diverge in batch 2 of epoch 0 (step 2): output encoder.layers.2;\n"
        "2 of 4 differ.\n"
        "Rank 7: only the reference has 1 record, the first the end of the fit (epoch 0,\n"
        "step 0).\n"
        "Rank 7: this run was ended before it finished its ledger."
    )


def test_json(tmp_path, compare):
    """One object, with the facts of the text."""
    one, other = write(tmp_path), write(tmp_path, drift=1)
    facts = json.loads(compare(one, other, "--json")[1])
    assert (facts["expected"], facts["actual"]) == (str(one), str(other))
    assert facts["verdict"] == "different"
    first = facts["ranks"][0]["divergence"]
    assert (first["epoch"], first["kind"], first["count"]) == (1, "weights", 13)
    assert [place[2] for place in first["places"]][:10] == NAMES[:10]
    facts = json.loads(compare(one, write(tmp_path, seed=1), "--json")[1])
    assert facts["verdict"] == "not comparable"
    assert facts["refusals"] == [{"field": "seed", "expected": 42, "actual": 1, "ranks": [0]}]


def test_markdown(tmp_path, compare):
    """The evidence stays in its block, whatever a name in the ledger holds."""
    one, other = write(tmp_path, stack={"```": "a"}), write(tmp_path, stack={"```": "b"})
    status, output = compare(one, other, "--format", "markdown")
    assert status == 0
    assert output.startswith("**equal**: 5 records")
    assert output.count("```") == 2


def test_it_loads_no_torch(tmp_path):
    """From the command line to the verdict, with its exit status."""
    one, other = write(tmp_path), write(tmp_path, drift=0)
    code = (
        "import sys; from lightning_d9m.tools.cli.main import main; status = main(sys.argv[1:])\n"
    )
    code += "heavy = {'torch', 'lightning', 'pytorch_lightning', 'numpy'} & set(sys.modules)\n"
    words = [sys.executable, "-c", f"{code}print(status, heavy)", "compare", str(one), str(other)]
    first, *_, last = subprocess.check_output(words, text=True).splitlines()
    assert first.startswith("different: ")
    assert last == "1 set()"


def test_numbers_are_decimal_and_verbose_shows_their_bits(tmp_path, compare):
    """A loss that differs by one ulp."""
    losses = []
    for loss in (0.1, math.nextafter(0.1, 1)):
        record = make_weights("epoch", 0, {}, loss=loss.hex())
        losses.append(write_rank(create_ledger_folder(tmp_path), [record]))
    _, out = compare(*losses)
    assert "reference: 0.1\n" in out
    assert "this run:  0.10000000000000002\n" in out
    assert "reference: 0x1.999999999999ap-4 (0.1)\n" in compare("-v", *losses)[1]
