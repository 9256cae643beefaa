"""``d9m compare --noise``: whether noise explains a difference."""

import json
import math
from functools import partial
from xml.etree import ElementTree as ET

import pytest
from ledger_runs import make_facts, make_weights, write_rank

from lightning_d9m.engine.ledger.folder import create_ledger_folder, read_ledger
from lightning_d9m.tools.comparison.noise import judge_change


def write(parent, accuracy=None, *, epochs=2, loss=0.5, end="final", **header):
    """Write a training that logs an accuracy."""
    records = [make_facts()]
    values = {"scalars": {} if accuracy is None else {"accuracy": float(accuracy).hex()}}
    values["loss"] = None if loss is None else loss.hex()
    for number in range(epochs + 1):
        moment, epoch = ("epoch", number) if number < epochs else (end, epochs - 1)
        records.append(make_weights(moment, epoch, {}, step=9 * number + 9, **values))
    return write_rank(create_ledger_folder(parent), records, **header)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Work in a folder with five reruns, a run before the change and two after it."""
    monkeypatch.chdir(tmp_path)
    for number, accuracy in enumerate((0.80, 0.81, 0.82, 0.79, 0.80), start=1):
        write(tmp_path / f"noise/run-{number:03d}", accuracy)
    write(tmp_path / "before", 0.80)
    write(tmp_path / "little", 0.815)
    write(tmp_path / "much", 0.90)
    return tmp_path


@pytest.fixture
def compare(d9m):
    return partial(d9m, "compare")


def test_a_change_within_noise_is_said_in_one_sentence(here, compare):
    status, out, _ = compare("before", "little", "--noise", "noise")
    assert status == 0
    sentence = " ".join(out.partition("\n\n")[0].split())
    assert sentence == (
        "within noise: accuracy, of 2 values the clearest, changes by +0.015, and 5 reruns spread "
        "over 0.03. Noise alone changes it that much in 40% of pairs of runs."
    )
    assert max(map(len, out.splitlines())) <= 80


def test_a_change_beyond_noise_has_a_plot(here, compare):
    words = ("before", "much", "--noise", "noise", "--plot", "a.svg")
    status, out, _ = compare(*words)
    assert status == 1
    assert out.startswith("beyond noise: accuracy, of 2 values the clearest, changes by +0.1, and")
    drawing = ET.parse(here / "a.svg")  # noqa: S314 - our own
    shown = [one.text for one in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert {"accuracy", "reference", "this run", "others: without the change"} <= set(shown)
    assert len(list(drawing.iter("{http://www.w3.org/2000/svg}polyline"))) == 7
    status, out, _ = compare(*words, "--json")
    facts = json.loads(out)
    assert facts["verdict"] == "beyond noise"
    assert facts["values"][0]["change"] == pytest.approx(0.1)
    status, out, _ = compare(*words[:4], "--format", "markdown")
    assert out.startswith("**beyond noise**: ")


@pytest.mark.parametrize(
    ("noise", "changed", "status", "said"),
    [
        ((0.8, 0.8, 0.8), 0.8000001, 1, "changes by +1e-07, and 3 reruns all agree."),
        ((0.8, 0.8, 0.8), 0.8, 0, "no logged value changes, and 3 reruns show the noise."),
        ((0.1, 0.2, 0.3), 0.81, 0, "and 3 runs with 3 seeds spread over 0.2."),
        ((0.80, 0.81, 0.82), 0.81, 0, "and 3 runs with changed last bits spread over 0.02."),
    ],
)
def test_what_the_runs_without_a_change_show(
    tmp_path, monkeypatch, compare, noise, changed, status, said
):
    monkeypatch.chdir(tmp_path)
    for number, accuracy in enumerate(noise, start=1):
        header = {"seed": number} if "seeds" in said else {}
        header |= {"settings": {"last_bits": number}} if "bits" in said else {}
        write(tmp_path / f"noise/run-{number:03d}", accuracy, **header)
    write(tmp_path / "a", 0.8)
    write(tmp_path / "b", changed)
    found, out, _ = compare("a", "b", "--noise", "noise")
    assert found == status
    assert said in " ".join(out.split())


def test_an_audit_shows_the_noise_of_its_runs_without_determinism(tmp_path, monkeypatch, compare):
    monkeypatch.chdir(tmp_path)
    for number, accuracy in enumerate((0.7, 0.8, 0.9), start=1):
        write(tmp_path / f"audit/without-{number:03d}", accuracy)
        write(tmp_path / f"audit/with-{number:03d}", 0.8)
    write(tmp_path / "a", 0.8)
    write(tmp_path / "b", 0.85)
    status, out, _ = compare("a", "b", "--noise", "audit", "--json")
    assert status == 0
    accuracy = next(v for v in json.loads(out)["values"] if v["name"] == "accuracy")
    assert sorted(accuracy["noise"]) == [0.7, 0.8, 0.9]


def test_a_value_that_is_not_finite_is_left_out_or_a_change(tmp_path):
    noise = [read_ledger(write(tmp_path / "noise", value)) for value in (0.1, 0.2, 0.3)]
    expected, other = (read_ledger(write(tmp_path / f"{v}", v)) for v in (0.2, math.inf))
    assert judge_change(expected, other, noise).verdict == "beyond noise"
    noise.append(read_ledger(write(tmp_path / "noise", math.nan)))
    found = judge_change(expected, other, noise)
    assert ([value.name for value in found.values], found.left_out) == (["loss"], ["accuracy"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["before", "much", "--noise", "before"], "1 runs show the noise, and at least 3"),
        (["before", "much", "--noise", "."], "is among the runs that show the noise"),
        (["before", "killed", "--noise", "noise"], "did not finish, so it cannot be measured"),
        (["before", "bare", "--noise", "noise"], "no value that all of them log at the end"),
        (["before", "seeded", "--noise", "noise"], "have the seeds 42 and 7, and the runs"),
        (["before", "much", "--plot", "a.svg"], "--plot is only for --noise"),
        (
            ["before", "much", "--noise", "noise", "--plot", "none/a.svg"],
            "The plot none/a.svg cannot be written: No such file",
        ),
        (["before", "much", "--noise", "none"], "none is not a folder"),
    ],
)
def test_wrong_words_are_one_clear_error(here, compare, words, message):
    write(here / "killed", 0.8, end="epoch")
    write(here / "bare", None, loss=None)
    write(here / "seeded", 0.8, seed=7)
    status, out, errors = compare(*words)
    assert (status, out) == (2, "")
    assert message in errors
