"""``d9m audit model``: the spread without determinism, and equality with it."""

import json

import pytest
import torch
from forking_python import shared_python

from lightning_d9m.hashing.training_state import sketch_tensors

# A command that leaves ledgers as a training does, without the seconds of loading torch. VALUE
# says, by condition and number of the run, which of the prepared sketches its weights have.
COMMAND = """
import json, os
from pathlib import Path
from lightning_d9m.ledger.format.writer import LedgerWriter
from lightning_d9m.ledger.folder import create_ledger_folder, rank_path
from lightning_d9m.ledger.format.records import Digests, End, Header, RunFacts

place = Path(os.environ["LIGHTNING_D9M_LEDGER_DIR"])
condition, number = place.name.split("-")[0], int(place.name.split("-")[1])
assert os.environ["LIGHTNING_D9M_CONTROL"] == {"with": "on", "without": "off"}[condition]
assert os.environ["PYTHONHASHSEED"].isdigit()
sketches = json.loads(Path("sketches.json").read_text())
for _ in range(FITS):
    folder = create_ledger_folder(place)
    with LedgerWriter(rank_path(folder, 0)) as ledger:
        ledger.write(Header(rank=0, world_size=1, fit=0, seed=42, created="", package="0",
                            settings={}, stack={}).as_record())
        ledger.write(RunFacts(model="m", parameters=1, train=[]).as_record())
        for moment, epoch in MOMENTS:
            value = 0 if (moment, epoch) == ("epoch", 0) else VALUE
            ledger.write(Digests(moment=moment, epoch=epoch, step=epoch,
                                 totals={"weights": f"{value:032x}"},
                                 groups={"weights": {"first.w": f"{value:032x}",
                                                     "second.w": "0" * 32}},
                                 sketches=sketches[value] if SKETCHED and moment == "epoch" else {},
                                 loss=float(value).hex(),
                                 scalars={"accuracy": (0.5).hex()}).as_record())
        ledger.write(End(status="finished").as_record())
"""
WHOLE = [("epoch", 0), ("epoch", 1), ("final", 1)]


@pytest.fixture
def audit(tmp_path, monkeypatch, d9m):
    """Return a function that audits such a command; it gives status, output and errors."""
    monkeypatch.chdir(tmp_path)
    sketches = [  # one element of two, in one layer of two, moves by a quarter
        sketch_tensors({"first.w": torch.tensor([1.0, 1.0 + value / 4]), "second.w": torch.ones(2)})
        for value in range(4)
    ]
    (tmp_path / "sketches.json").write_text(json.dumps(sketches))

    def run(value, *words, fits="1", moments=WHOLE, sketched=True):
        code = COMMAND.replace("VALUE", value).replace("FITS", fits)
        (tmp_path / "script.py").write_text(
            code.replace("MOMENTS", repr(moments)).replace("SKETCHED", str(sketched))
        )
        return d9m("audit", "model", "-n", "3", *words, "--", shared_python(), "script.py")

    return run


VARIES = "(0 if condition == 'with' else number - 1)"


def test_what_varies_without_determinism_is_measured(audit, tmp_path):
    """As text, as a page and as JSON."""
    status, out, err = audit(VARIES)
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
    assert fit["without"]["scalars"]["final loss"] | {"deviation": ""} == {
        "distinct": 3,
        "least": "0.0",
        "greatest": "2.0",
        "deviation": "",
    }
    assert fit["without"]["scalars"]["accuracy"]["distinct"] == 1


def test_without_sketches_the_number_of_tensors_is_known(audit):
    _, out, _ = audit(VARIES, "--json", sketched=False)
    (fit,) = json.loads(out)["fits"]
    assert [moment["distance"] for moment in fit["without"]["moments"]] == [0, None, None]
    assert [moment["tensors"] for moment in fit["without"]["moments"]] == [0, 1, 1]


def test_runs_that_differ_with_determinism_are_found(audit):
    status, out, _ = audit("int(number == 3)")
    assert status == 1
    assert out.startswith("different: 3 runs with determinism left 2 digests of the weights, ")
    assert out.endswith("  finds the step, module and source line\n")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fits": "0"}, "wrote no ledger"),
        ({"fits": "number"}, "left different numbers of ledgers"),
        ({"moments": WHOLE[:2]}, "did not finish"),
    ],
)
def test_runs_that_cannot_be_measured(audit, settings, message):
    status, _, err = audit("0", **settings)
    assert status == 2
    assert message in err
