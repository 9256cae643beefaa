"""Deterministic PyTorch Lightning training, proven by a ledger.

Public names are loaded on first use, so that importing the package loads neither torch nor
Lightning, and the command line answers at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_d9m.adapters.bit_exact import assert_bit_exact
    from lightning_d9m.adapters.callback import DeterminismCallback
    from lightning_d9m.adapters.horovod.strategy import HorovodDeterministicStrategy
    from lightning_d9m.control.session import Session, deterministic, enable
    from lightning_d9m.control.settings import Settings
    from lightning_d9m.errors import (
        CheckpointError,
        D9mError,
        DigestError,
        DriftError,
        InexactResumeError,
        LedgerError,
        NotBitExactError,
        RankLostError,
        RanksDisagreeError,
        ReferenceRefusedError,
        SettingError,
        StackDifferenceError,
        TooLateError,
    )
    from lightning_d9m.evidence.digest import digest

__version__ = "0.1.0"

_HOME = {
    "CheckpointError": "errors",
    "D9mError": "errors",
    "DeterminismCallback": "adapters.callback",
    "DigestError": "errors",
    "DriftError": "errors",
    "HorovodDeterministicStrategy": "adapters.horovod.strategy",
    "InexactResumeError": "errors",
    "LedgerError": "errors",
    "NotBitExactError": "errors",
    "RankLostError": "errors",
    "RanksDisagreeError": "errors",
    "ReferenceRefusedError": "errors",
    "Session": "control.session",
    "SettingError": "errors",
    "Settings": "control.settings",
    "StackDifferenceError": "errors",
    "TooLateError": "errors",
    "assert_bit_exact": "adapters.bit_exact",
    "deterministic": "control.session",
    "digest": "evidence.digest",
    "enable": "control.session",
}

__all__ = [
    "CheckpointError",
    "D9mError",
    "DeterminismCallback",
    "DigestError",
    "DriftError",
    "HorovodDeterministicStrategy",
    "InexactResumeError",
    "LedgerError",
    "NotBitExactError",
    "RankLostError",
    "RanksDisagreeError",
    "ReferenceRefusedError",
    "Session",
    "SettingError",
    "Settings",
    "StackDifferenceError",
    "TooLateError",
    "assert_bit_exact",
    "deterministic",
    "digest",
    "enable",
]


def __getattr__(name: str) -> Any:
    """Load a public name from the module that defines it."""
    if name == "probe":  # the module itself: lightning_d9m.probe.monitor(x, "name")
        return import_module(f"{__name__}.probe")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
