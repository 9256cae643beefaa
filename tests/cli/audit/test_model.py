"""``d9m audit model``: the spread without determinism, and equality with it."""

import json

import pytest
import torch
from ledger_runs import make_facts, make_weights, write_rank

from lightning_d9m.engine.hashing.training_state import sketch_tensors
from lightning_d9m.engine.ledger.folder import create_ledger_folder
from lightning_d9m.tools.launch import run as launched_run

WHOLE = [("epoch", 0), ("epoch", 1), ("final", 1)]


@pytest.fixture
def audit(tmp_path, monkeypatch, d9m):
    """Return a function that audits a command, which leaves its ledgers without a process.

    ``value`` says, by condition and number of the run, which weights it ends with.
    """
    monkeypatch.chdir(tmp_path)
    sketches = [  # one element of two, in one layer of two, moves by a quarter
        sketch_tensors({"first.w": torch.tensor([1.0, 1.0 + value / 4]), "second.w": torch.ones(2)})
        for value in range(4)
    ]

    def run(value, *words, fits=lambda _: 1, moments=WHOLE, sketched=True):
        def train(_, folder, *, progress, variables, **__):
            condition, number = folder.name.split("-")
            control = {"with": "on", "without": "off"}[condition]
            assert variables["LIGHTNING_D9M_CONTROL"] == control
            for _ in range(fits(int(number))):
                records = [make_facts()]
                for moment, epoch in moments:
                    own = 0 if (moment, epoch) == ("epoch", 0) else value(condition, int(number))
                    digest = f"{own:032x}"
                    weights = {"first.w": digest, "second.w": "0" * 32}
                    facts = {"loss": float(own).hex(), "scalars": {"accuracy": (0.5).hex()}}
                    facts["sketches"] = sketches[own] if sketched and moment == "epoch" else {}
                    facts["totals"] = {"weights": digest}
                    records.append(make_weights(moment, epoch, weights, **facts))
                with progress:
                    write_rank(create_ledger_folder(folder), records)

        monkeypatch.setattr(launched_run, "run_once", train)
        return d9m("audit", "model", "-n", "3", *words, "--", "train")

    return run


def varies(condition, number):
    return 0 if condition == "with" else number - 1


def test_what_varies_without_determinism_is_measured(audit, tmp_path):
    """As text, as a page and as JSON."""
    status, out, err = audit(varies)
    folder = tmp_path / "d9m-audit" / "model-000"
    assert status == 0
    assert out.startswith(
        "equal: 3 runs with determinism left 1 digest of the weights, without 3.\n\n"
    )
    assert "run 3 of 3, with determinism: done, 2 epochs\n" in err
    page = (folder / "model.md").read_text()
    assert "| first | 0.2" in page
    assert "| final | 3 | 0.1" in page
    shown = [line.split()[:5] for line in out.splitlines()]
    assert ["final", "loss", "3", "0.0", "2.0"] in shown
    assert "second" not in out  # only the page has the layers
    (fit,) = json.loads((folder / "model.json").read_text())["fits"]
    assert fit["with"]["distinct"] == 1
    assert [moment["distinct"] for moment in fit["without"]["moments"]] == [1, 3, 3]
    assert [moment["tensors"] for moment in fit["without"]["moments"]] == [0, 1, 1]
    final = fit["without"]["moments"][-1]
    # Runs 2 and 3 lie by 1/4 and 1/2 from run 1 in one element of four.
    norms = [2.0, (3 + 1.25**2) ** 0.5, (3 + 1.5**2) ** 0.5]
    assert final["distance_max"] == pytest.approx(0.5 / norms[2])
    assert final["distance"] == pytest.approx((0.25 / norms[1] + 0.5 / norms[2]) / 2)
    assert fit["without"]["layers"]["second"]["distance"] == 0
    assert fit["without"]["layers"]["first"]["tensors"] == 1
    spread = fit["without"]["scalars"]
    assert spread["final loss"].items() > {"distinct": 3, "least": "0.0", "greatest": "2.0"}.items()
    assert float(spread["final loss"]["deviation"]) == pytest.approx((2 / 3) ** 0.5)
    assert spread["accuracy"]["distinct"] == 1


def test_without_sketches_the_number_of_tensors_is_known(audit):
    _, out, _ = audit(varies, "--json", sketched=False)
    (fit,) = json.loads(out)["fits"]
    assert [moment["distance"] for moment in fit["without"]["moments"]] == [0, None, None]
    assert [moment["tensors"] for moment in fit["without"]["moments"]] == [0, 1, 1]


def test_runs_that_differ_with_determinism_are_found(audit):
    status, out, _ = audit(lambda _, number: int(number == 3))
    assert status == 1
    assert out.startswith("different: 3 runs with determinism left 2 digests of the weights, ")
    assert out.endswith("  finds the step, module and source line\n")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fits": lambda _: 0}, "wrote no ledger"),
        ({"fits": lambda number: number}, "left different numbers of ledgers"),
        ({"moments": WHOLE[:2]}, "did not finish"),
    ],
)
def test_runs_that_cannot_be_measured(audit, settings, message):
    status, _, err = audit(lambda *_: 0, **settings)
    assert status == (2 if message == "did not finish" else 3)
    assert message in err
