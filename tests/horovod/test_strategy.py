"""Options of the strategy, without ranks."""

import re
import subprocess
import sys

import pytest

from lightning_d9m import HorovodDeterministicStrategy, SettingError
from lightning_d9m.integrations.strategies.horovod.environment import import_horovod


def test_an_option_that_logical_ranks_do_not_support_is_refused():
    with pytest.raises(SettingError, match="compression='fp16' does not go with logical_ranks"):
        HorovodDeterministicStrategy(logical_ranks=4, compression="fp16")
    assert HorovodDeterministicStrategy(compression="fp16").logical_ranks is None


@pytest.mark.parametrize(
    "options",
    [
        {"op": "max"},
        {"op": ["sum"]},
        {"compression": "int8"},
        {"compression": ["fp16"]},
        {"bucket_bytes": -1},
        *({"stall_seconds": value} for value in (0, -1, float("inf"), float("nan"), None, "60")),
    ],
)
def test_an_option_that_is_not_known_is_refused(options):
    ((name, value),) = options.items()
    with pytest.raises(
        SettingError, match=rf"{name}={re.escape(repr(value))} is not (known|allowed): pass"
    ):
        HorovodDeterministicStrategy(**options)


@pytest.mark.parametrize("kind", ["HorovodDeterministicStrategy", "DDPDeterministicStrategy"])
def test_importing_a_strategy_makes_its_name_known(forking_python, kind):
    """Whichever is imported first, the strategy or Lightning."""
    ours = f"from lightning_d9m import {kind} as kind"
    lightning = "from lightning.pytorch.strategies import StrategyRegistry as known"
    for first, second in ((ours, lightning), (lightning, ours)):
        program = f"{first}\n{second}\nassert kind.strategy_name in known"
        subprocess.run([forking_python, "-c", program], check=True, timeout=120)


def test_a_horovod_that_is_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "horovod.torch", None)
    with pytest.raises(SettingError, match=r"Horovod cannot be imported.*d9m install-horovod"):
        import_horovod()
