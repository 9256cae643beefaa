"""Variables become settings by the signature that takes them; a slip is one clear sentence."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest

from lightning_d9m import DeterminismCallback, SettingError, Settings
from lightning_d9m.lightning.autoload.env_settings import (
    CONTROL_VARIABLES,
    read_settings,
    read_switch,
    read_value,
    reject_unknown_variables,
    variable_of,
)


def test_the_callbacks_settings():
    given = {
        "LIGHTNING_D9M_SEED": "42",
        "LIGHTNING_D9M_REFERENCE": "runs/fit-000",
        "LIGHTNING_D9M_ON_DRIFT": "warn",
        "LIGHTNING_D9M_THREADS": "none",
        "LIGHTNING_D9M_PER_SAMPLE_RNG": "1",
        "LIGHTNING_D9M_IGNORED_METRICS": "time/*, speed",
        "LIGHTNING_D9M_LEDGER_DIR": "",
        "OTHER": "1",
    }
    assert read_settings(DeterminismCallback, given) == {
        "seed": 42,
        "reference": "runs/fit-000",
        "on_drift": "warn",
        "threads": None,
        "per_sample_rng": True,
        "ignored_metrics": ("time/*", "speed"),
    }


def test_every_setting_can_be_given():
    """A new setting whose type has no reader here fails this test, not a user."""
    samples = ("1", "warn", "none", "a")
    for owner in (DeterminismCallback, Settings):
        for name in inspect_names(owner):
            assert any(reads(owner, name, text) for text in samples), name


def inspect_names(owner):
    """Return the names of the settings that a signature takes."""
    return list(inspect.signature(owner).parameters)


def reads(owner, name, text):
    try:
        return name in read_settings(owner, {variable_of(name): text})
    except SettingError:
        return False


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        (bool, "1", True),
        (bool, "Off", False),
        (int | None, "-3", -3),
        (int | None, "None", None),
        (float, "0.5", 0.5),
        (str | Path | None, "a b", "a b"),
        (Path | None, "a", Path("a")),
        (Literal["a", "b"], "b", "b"),
        (Sequence[str], "one", ("one",)),
        (Sequence[int] | None, "0, 2", (0, 2)),
        (tuple[str, ...], "x,,y", ("x", "y")),
        (str | Sequence[str], "x,y", ("x", "y")),
    ],
)
def test_values(annotation, text, value):
    assert read_value("V", text, annotation) == value


@pytest.mark.parametrize(
    ("annotation", "text", "allowed"),
    [
        (bool, "maybe", "1 or 0"),
        (int | None, "two", "a whole number or none"),
        (Literal["raise", "warn"], "shrug", "raise or warn"),
        (Sequence[int], "1,x", "a whole number, several separated by commas"),
        (dict[str, int], "1", "nothing; it is set in the program"),
    ],
)
def test_a_bad_value_is_one_sentence(annotation, text, allowed):
    with pytest.raises(SettingError) as caught:
        read_value("LIGHTNING_D9M_X", text, annotation)
    assert str(caught.value) == f"The variable LIGHTNING_D9M_X is {text!r}; allowed: {allowed}."


@pytest.mark.parametrize(
    ("value", "asked"), [("1", True), ("on", True), ("", False), ("0", False), ("no", False)]
)
def test_the_switch(value, asked):
    assert read_switch({"LIGHTNING_D9M": value}) is asked
    assert not read_switch({})


def test_a_misspelt_variable_is_said():
    known = dict.fromkeys([*CONTROL_VARIABLES, "LIGHTNING_D9M", "LIGHTNING_D9M_SEED", "HOME"], "1")
    reject_unknown_variables(DeterminismCallback, known)
    with pytest.raises(SettingError, match=r"Did you mean LIGHTNING_D9M_REFERENCE\?") as caught:
        reject_unknown_variables(DeterminismCallback, known | {"LIGHTNING_D9M_REFRENCE": "x"})
    assert str(caught.value).startswith("There is no variable LIGHTNING_D9M_REFRENCE.")
