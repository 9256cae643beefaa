"""The settings of a run: given to the callback, inherited from the active session, or default."""

import pytest

from lightning_d9m.control.session import enable
from lightning_d9m.control.settings import Settings
from lightning_d9m.errors import SettingError
from lightning_d9m.ledger.format.records import Header
from lightning_d9m.lightning.trainer_session import resolve_settings


@pytest.mark.parametrize("given", [True, False])
def test_a_given_value_takes_precedence_even_if_it_equals_the_default(given):
    with enable(fill_uninitialized_memory=not given, per_sample_rng=not given):
        explicit = resolve_settings({"fill_uninitialized_memory": given, "per_sample_rng": given})
        inherited = resolve_settings({})
    assert (explicit.fill_uninitialized_memory, explicit.per_sample_rng) == (given, given)
    assert (inherited.fill_uninitialized_memory, inherited.per_sample_rng) == (not given,) * 2


@pytest.mark.usefixtures("unseeded")
def test_without_a_session_the_defaults_apply():
    assert resolve_settings({}) == Settings()


@pytest.mark.parametrize(("outer", "given"), [(False, True), (True, False)])
def test_the_ledger_names_the_setting_that_was_given(fit, outer, given):
    with enable(fill_uninitialized_memory=outer):
        header: Header = fit(fill_uninitialized_memory=given).header
        assert header.settings["fill_uninitialized_memory"] is given
        assert fit().header.settings["fill_uninitialized_memory"] is outer


def test_patches_of_the_session_cannot_be_refused_by_a_run():
    with enable(patch_ops=True):
        assert resolve_settings({}).patch_ops
        with pytest.raises(SettingError, match=r"enable\(\) has patched the operations already"):
            resolve_settings({"patch_ops": False})
