"""The list of errors that no test made holds what was not executed, and only that."""

import pytest
from raise_sites import PACKAGE, find_sites, find_unexecuted, note_sites

from lightning_d9m.control.settings import Settings
from lightning_d9m.errors import D9mError, LedgerError, SettingError


def test_a_site_is_each_call_that_makes_one_of_our_errors():
    source = "raise SettingError(\n    'no'\n)\nerrors.LedgerError('no')\nraise ValueError('no')\n"
    assert find_sites(source, "a") == [("a", 1, 3), ("a", 4, 4)]


def test_what_was_executed_is_not_listed(tmp_path):
    file = tmp_path / "noted"
    before = vars(D9mError).get("__new__")
    undo = note_sites(file)
    try:
        for seed in (-1, -2):
            with pytest.raises(SettingError, match="allowed"):
                Settings(seed=seed)
        assert str(LedgerError(2, "gone")).endswith("gone")  # an OSError still
    finally:
        undo()
    settings = PACKAGE / "control" / "settings.py"
    executed = {path for path, _ in (line.split("\t") for line in file.read_text().splitlines())}
    assert str(settings) in executed
    sites = [site for site in find_unexecuted(file) if site.startswith("control/settings.py")]
    assert len(sites) == len(find_sites(settings.read_text(), settings)) - 1
    assert vars(D9mError).get("__new__") == before
    assert str(SettingError("as before")) == "as before"
