"""Settings and their variables: a value that is not allowed is one clear sentence."""

import inspect
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Literal

import pytest

from lightning_d9m import DeterminismCallback, SettingError, Settings
from lightning_d9m.engine.control.environment import control_is_on
from lightning_d9m.engine.control.session import deterministic
from lightning_d9m.engine.control.settings import (
    CONTROL_VARIABLES,
    HIGHEST_SEED,
    build_from_variables,
    read_settings,
    read_switch,
    read_value,
    variable_of,
)
from lightning_d9m.engine.probes.settings import ProbeSettings
from lightning_d9m.engine.recording.run import RunOptions
from lightning_d9m.integrations.lightning.trainer_session import resolve_settings, select_given

OWNERS = (DeterminismCallback, Settings, ProbeSettings)
SETTINGS = [(owner, name) for owner in OWNERS for name in inspect.signature(owner).parameters]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"seed": -1}, "seed is -1; allowed: a whole number from 0 to 4294967295"),
        ({"seed": HIGHEST_SEED + 1}, "seed is 4294967296; allowed"),
        ({"seed": True}, "seed is True; allowed"),
        ({"seed": 1.0}, r"seed is 1\.0; allowed"),
        ({"threads": 0}, "threads is 0; allowed: a whole number from 1"),
        ({"per_sample_rng": 1}, "per_sample_rng is 1; allowed: True or False"),
        ({"unpatched_ops": ("histc",), "patch_ops": False}, r"\['histc'\] and patch_ops is off"),
        ({"unpatched_ops": ("tokp",), "patch_ops": True}, "no op 'tokp'"),
        ({"unpatched_ops": "tokp", "patch_ops": True}, "no op 'tokp'"),
        ({"varying_ops": 3}, "varying_ops is 3; allowed: a name, or a list of names"),
        ({"varying_ops": ("roi_pol",)}, "no op 'roi_pol'"),
    ],
)
def test_a_bad_value_is_refused(words, message):
    with pytest.raises(SettingError, match=message):
        Settings(**words)


@pytest.mark.parametrize(("owner", "name"), SETTINGS)
def test_every_setting_can_be_given(owner, name):
    """A new setting whose type has no reader here fails this test, not a user."""
    assert any(reads(owner, name, text) for text in ("1", "warn", "none", "a"))
    assert read_settings(owner, {variable_of(name): " "}) == {}


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
        (bool | None, "maybe", "1 or 0 or none"),
        (int | None, "two", "a whole number or none"),
        (Literal["raise", "warn"], "shrug", "raise or warn"),
        (Sequence[int], "1,x", "a whole number, several separated by commas"),
        (Sequence[str] | None, ",", "a text, several separated by commas or none"),
        (dict[str, int], "1", "nothing; it is set in the program"),
    ],
)
def test_a_bad_text_is_one_sentence(annotation, text, allowed):
    with pytest.raises(SettingError) as caught:
        read_value("LIGHTNING_D9M_X", text, annotation)
    assert str(caught.value) == f"The variable LIGHTNING_D9M_X is {text!r}; allowed: {allowed}."


def test_the_switch_is_on_or_off(monkeypatch):
    assert [read_switch({"LIGHTNING_D9M": text}) for text in ("1", "", "no")] == [
        True,
        False,
        False,
    ]
    monkeypatch.setenv("LIGHTNING_D9M_CONTROL", "0")
    with pytest.raises(SettingError, match="_CONTROL is '0'; allowed: on or off"):
        control_is_on()


@pytest.mark.parametrize("owner", [Settings, RunOptions, ProbeSettings, DeterminismCallback])
def test_every_variable_is_known_wherever_some_are_read(owner):
    """A program's callback reads some, its session others; each refuses one that does not exist."""
    settings = (inspect.signature(each).parameters for each in (Settings, DeterminismCallback))
    names = [*CONTROL_VARIABLES, "LIGHTNING_D9M", "HOME", *map(variable_of, chain(*settings))]
    known = dict.fromkeys(names, "")
    assert read_settings(owner, known) == {}
    with pytest.raises(SettingError, match=r"Did you mean LIGHTNING_D9M_PROVABLE\?") as caught:
        read_settings(owner, known | {"LIGHTNING_D9M_PROVABEL": "1"})
    assert str(caught.value).startswith("The variable LIGHTNING_D9M_PROVABEL does not exist.")


def test_a_callback_of_the_program_refuses_a_misspelled_variable(monkeypatch):
    monkeypatch.setenv("LIGHTNING_D9M_PROVABEL", "1")
    with pytest.raises(SettingError, match="Did you mean LIGHTNING_D9M_PROVABLE"):
        RunOptions().overridden(os.environ)


@pytest.mark.parametrize(
    ("setting", "argument", "text", "value"),
    [
        ("seed", 3, "7", 7),
        ("per_sample_rng", False, "1", True),
        ("threads", 1, "2", 2),
        ("unpatched_ops", ("put_",), "cumsum", ("cumsum",)),
        ("varying_ops", ("torchvision::_roi_pool_backward",), "histc", ("histc",)),
    ],
)
@pytest.mark.usefixtures("unseeded")
def test_arguments_take_precedence_over_the_session_that_variables_configure(
    setting, argument, text, value
):
    """The session is the one that ``LIGHTNING_D9M=1`` opens."""
    with deterministic(Settings(**read_settings(Settings, {variable_of(setting): text}))):
        assert getattr(resolve_settings({}), setting) == value
        given = select_given({setting: argument})
        assert getattr(resolve_settings(given), setting) == argument
    assert getattr(resolve_settings({}), setting) == getattr(Settings(), setting)
    assert variable_of(setting) not in CONTROL_VARIABLES


def test_an_error_names_the_variables_that_give_the_settings():
    settings = read_settings(Settings, {"LIGHTNING_D9M_THREADS": "0"})
    with pytest.raises(SettingError, match=r"threads is 0; allowed: .*from LIGHTNING_D9M_THREADS"):
        build_from_variables(Settings, settings)
    with pytest.raises(SettingError, match=r"wrong$"):
        build_from_variables(reject_everything, {})


def reject_everything():
    raise SettingError("wrong")


REPORT = """
import os
os.environ["PYTHONHASHSEED"] = {inside!r} or os.environ.get("PYTHONHASHSEED", "")
from lightning_d9m.engine.control.settings import describe_hash_seed_problem
print(describe_hash_seed_problem())
"""


@pytest.mark.parametrize(
    ("started_with", "inside", "options", "fixed"),
    [
        ("0", "", (), True),
        ("5", "", (), True),
        ("5", "", ("-E",), False),  # Python does not read it
        ("random", "0", (), False),  # too late: Python has read it
    ],
)
def test_the_hash_seed_is_judged_by_how_python_was_started(started_with, inside, options, fixed):
    command = [sys.executable, *options, "-c", REPORT.format(inside=inside)]
    variables = os.environ | {"PYTHONHASHSEED": started_with}
    printed = subprocess.check_output(command, env=variables, text=True)
    assert (printed == "None\n") == fixed
    assert fixed or "Start the program with PYTHONHASHSEED=0" in printed
