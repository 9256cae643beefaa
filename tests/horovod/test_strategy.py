"""Options of the strategy, without ranks."""

import subprocess

import pytest

from lightning_d9m import HorovodDeterministicStrategy, SettingError


@pytest.mark.parametrize("options", [{"compression": "fp16"}, {"broadcast_buffers": False}])
def test_an_option_that_logical_ranks_do_not_support_is_refused(options):
    ((name, value),) = options.items()
    with pytest.raises(SettingError, match=f"{name}={value!r} does not go with logical_ranks"):
        HorovodDeterministicStrategy(logical_ranks=4, **options)
    assert HorovodDeterministicStrategy(**options).logical_ranks is None


@pytest.mark.parametrize("kind", ["HorovodDeterministicStrategy", "DDPDeterministicStrategy"])
def test_importing_a_strategy_makes_its_name_known(forking_python, kind):
    """Whichever is imported first, the strategy or Lightning."""
    ours = f"from lightning_d9m import {kind} as kind"
    lightning = "from lightning.pytorch.strategies import StrategyRegistry as known"
    for first, second in ((ours, lightning), (lightning, ours)):
        program = f"{first}\n{second}\nassert kind.strategy_name in known"
        subprocess.run([forking_python, "-c", program], check=True, timeout=120)
