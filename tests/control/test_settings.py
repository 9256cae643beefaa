"""Settings refuse what is not allowed, one clear error each."""

import sys

import pytest

from lightning_d9m import SettingError, Settings
from lightning_d9m.control.settings import HIGHEST_SEED


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"seed": -1}, "seed is -1; allowed: a whole number from 0 to 4294967295"),
        ({"seed": HIGHEST_SEED + 1}, "seed is 4294967296; allowed"),
        ({"seed": True}, "seed is True; allowed"),
        ({"seed": 1.0}, r"seed is 1\.0; allowed"),
        ({"seed": "1"}, "seed is '1'; allowed"),
        ({"seed": None}, "seed is None; allowed"),
        ({"threads": 0}, "threads is 0; allowed: a whole number from 1"),
        ({"threads": 2.0}, r"threads is 2\.0; allowed"),
        ({"per_sample_rng": 1}, "per_sample_rng is 1; allowed: True or False"),
        ({"patch_ops": None}, "patch_ops is None; allowed: True or False"),
        (
            {"unpatched_ops": ("histc",), "patch_ops": False},
            r"unpatched_ops is \['histc'\] and patch_ops is off",
        ),
        ({"unpatched_ops": ("tokp",), "patch_ops": True}, "no op 'tokp'"),
        ({"fill_uninitialized_memory": "no"}, "fill_uninitialized_memory is 'no'; allowed"),
    ],
)
def test_a_bad_value_is_refused(words, message):
    with pytest.raises(SettingError, match=message):
        Settings(**words)


def test_the_record_holds_every_setting():
    assert Settings(seed=3, threads=2, patch_ops=False).as_record() == {
        "seed": 3,
        "per_sample_rng": False,
        "threads": 2,
        "fill_uninitialized_memory": True,
        "patch_ops": False,
        "unpatched_ops": "",
    }


@pytest.mark.parametrize("release", [None, "13.0"])
def test_the_build_of_a_torch_that_is_not_imported_is_read(monkeypatch, tmp_path, release):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError('it was imported')")
    (tmp_path / "torch" / "version.py").write_text(f"cuda = {release!r}")
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.syspath_prepend(tmp_path)
    assert Settings().patch_ops is (release is not None)


def test_without_torch_nothing_is_patched_by_default(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr("lightning_d9m.control.settings.find_spec", lambda _: None)
    assert Settings().patch_ops is False
