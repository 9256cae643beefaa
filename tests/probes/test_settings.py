"""Settings of probes: values that are not allowed raise, and variables take precedence."""

import pytest

from lightning_d9m.engine.ledger.kinds import PROBE_KINDS
from lightning_d9m.engine.probes.settings import ProbeSettings
from lightning_d9m.errors import SettingError


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"probes": "wieght"}, "Did you mean 'weight'"),
        ({"probes": ["loss", 3]}, r"probes is \['loss', 3\]; allowed: a name, or a list of names"),
        ({"probes": 5}, "probes is 5; allowed: a name"),
        ({"probe_modules": 5}, "probe_modules is 5; allowed: a name"),
        ({"probe_steps": 5}, 'probe_steps is 5; allowed: "a:b"'),
        ({"probe_modules": []}, "probe_modules is"),
        ({"probe_steps": "7"}, 'allowed: "a:b"'),
        ({"probe_steps": "7:7"}, "a below b"),
        ({"probe_steps": "9:7"}, "a below b"),
    ],
)
def test_what_is_not_allowed_is_said(words, message):
    with pytest.raises(SettingError, match=message):
        ProbeSettings(**words)


def test_steps_modules_and_kinds_are_selected():
    """One value need not be in a list; steps are half open."""
    assert ProbeSettings(probes="loss, weight").probes == ("loss", "weight")
    assert ProbeSettings(probes="all").kinds == set(PROBE_KINDS)
    selected = {"3:5": [3, 4], "6:": [6, 7], ":2": [0, 1]}
    for text, steps in selected.items():
        settings = ProbeSettings(probe_steps=text)
        assert [step for step in range(8) if step in settings.steps] == steps
    settings = ProbeSettings(probe_modules=("encoder.*", "head"))
    assert settings.takes_module("encoder.layers.0")
    assert not settings.takes_module("encoder")
    assert settings.takes_parameter("head.weight")
    assert not settings.takes_module("")
    assert ProbeSettings(probe_modules=("(model)",)).takes_module("")


@pytest.mark.parametrize(("name", "text"), [("PROBE_STEPS", "2:1"), ("PROBES", "no")])
def test_a_variable_with_a_wrong_value_is_an_error(name, text):
    variable = f"LIGHTNING_D9M_{name}"
    with pytest.raises(SettingError, match=r"allowed|kinds are") as caught:
        ProbeSettings().overridden({variable: text})
    assert variable in str(caught.value)
    assert text in str(caught.value)


@pytest.mark.parametrize("name", ["PROBE_MODULES", "PROBE_STEPS", "EVIDENCE"])
def test_a_variable_that_selects_among_no_probes_is_an_error(name):
    given = {f"LIGHTNING_D9M_{name}": "0:1" if name == "PROBE_STEPS" else "1"}
    with pytest.raises(
        SettingError, match=f"these variables have no effect: LIGHTNING_D9M_{name}. Unset"
    ):
        ProbeSettings().overridden(given)
    assert ProbeSettings(probes=("loss",)).overridden(given)


def test_settings_are_recorded_only_where_something_is_on():
    assert ProbeSettings(probe_steps="1:2").as_record() == {}
    assert ProbeSettings(probes=("loss", "rng")).as_record()["probes"] == "rng loss"
