"""A run waits for one that is behind, unless that writes nothing for some time."""

import pytest

from lightning_d9m.engine.recording import pace
from lightning_d9m.engine.recording.pace import Pace, size_ledgers


@pytest.fixture
def clock(monkeypatch):
    """Let time pass in sleeps alone; return the seconds that have passed, and what each calls."""
    seconds, calls = [100.0], []

    def sleep(duration):
        seconds[0] += duration
        for call in calls:
            call()

    monkeypatch.setattr(pace.time, "monotonic", lambda: seconds[0])
    monkeypatch.setattr(pace.time, "sleep", sleep)
    return seconds, calls


@pytest.fixture
def write(tmp_path):
    def run(name, size, fit=0):
        folder = tmp_path / name / f"fit-{fit:03d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rank-0.jsonl").write_bytes(b"x" * size)
        return tmp_path / name

    return run


def test_a_run_waits_until_the_other_has_come_as_far(clock, write):
    seconds, calls = clock
    own, other = write("a", 3 * 10**6), write("b", 10**6)
    write("b", 10, fit=1)
    assert size_ledgers(other) == 10**6 + 10
    calls.append(lambda: write("b", size_ledgers(other) + 10**5))
    Pace(own, other).keep()
    assert size_ledgers(other) * 1.05 + 2**14 >= 3 * 10**6
    before = seconds[0]
    Pace(other, own).keep()  # which is behind
    assert seconds[0] == before


def test_no_wait_lasts_long_and_none_is_for_a_run_without_a_ledger(clock, write, monkeypatch):
    """Other ranks would give up."""
    monkeypatch.setattr(pace, "_POLL_SECONDS", 10.0)
    seconds, calls = clock
    own = write("a", 10**6)
    kept = Pace(own, own.parent / "b")
    kept.keep()
    assert seconds == [100.0]
    calls.append(lambda: write("b", size_ledgers(own.parent / "b") + 1))
    write("b", 1)
    for waits in (1, 2):
        seconds[0] += 1
        kept.keep()
        assert 180 * waits < seconds[0] - 100 < 200 * waits


def test_a_run_waits_thirty_seconds_for_one_that_writes_nothing_and_no_more(clock, write):
    """It looks four times a second, and waits again once the other one writes."""
    seconds, calls = clock
    own, other = write("a", 10**6), write("b", 1)
    kept = Pace(own, other)
    kept.keep()
    assert 130 < seconds[0] < 131
    seconds[0] += 1
    before = seconds[0]
    kept.keep()
    assert seconds[0] == before
    write("b", 2)
    kept.keep()
    assert seconds[0] == before  # it does not look so soon
    seconds[0] += 1
    calls.append(lambda: write("b", 10**6))
    kept.keep()
    assert before + 1 < seconds[0] < before + 2
