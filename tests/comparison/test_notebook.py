"""A comparison in a notebook: verdict, ledgers, what differs; nothing of it is markup."""

from xml.etree.ElementTree import fromstring

from lightning_d9m.comparison.ledgers import compare_ledgers
from lightning_d9m.ledger.folder import read_ledger


def show(*folders):
    comparison = compare_ledgers(*map(read_ledger, folders))
    return fromstring(f"<div>{comparison._repr_html_()}</div>")  # noqa: S314 - our own


def cells(shown):
    return [[cell.text or "" for cell in row] for row in shown.iter("tr")]


def test_equal_runs(runs):
    one, other = runs.write(2), runs.write(2)
    shown = show(one, other)
    assert "".join(shown.find("p").itertext()) == "equal: 6 records compared"
    assert cells(shown)[1:] == [["reference", str(one)], ["this run", str(other)]]


def test_the_first_difference_of_each_rank(runs):
    name = "<b>&layer"

    def edit(_, records):
        for record in records[4:-1]:
            record["groups"]["weights"][name] = "f" * 32

    def rename(_, records):
        for record in records[2:-1]:
            record["groups"]["weights"].setdefault(name, "0" * 32)

    one = runs.write(2, edit=rename)
    shown = show(one, runs.write(2, edit=lambda *words: (edit(*words), rename(*words))))
    assert shown.find("p/b").text == "different"
    assert cells(shown)[-1] == ["0", "1", "46", "", "weights", name, "1 of 13"]


def test_why_runs_cannot_be_compared(runs):
    shown = show(runs.write(1, seed=1), runs.write(1, seed=2))
    assert shown.find("p/b").text == "not comparable"
    assert ["seed", "1", "2"] in cells(shown)
