"""Deterministic PyTorch Lightning training, proven by a ledger.

Public names are loaded on first use, so that importing the package loads neither torch nor
Lightning, and the command line answers at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_d9m.version import __version__ as __version__

if TYPE_CHECKING:
    from lightning_d9m.audit.inference.fixed_batch import FixedShape, PerSample
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
    from lightning_d9m.hashing.digest import digest
    from lightning_d9m.horovod.strategy import HorovodDeterministicStrategy
    from lightning_d9m.lightning.callback import DeterminismCallback
    from lightning_d9m.testing import assert_bit_exact

_HOME = {
    "CheckpointError": "lightning_d9m.errors",
    "D9mError": "lightning_d9m.errors",
    "DeterminismCallback": "lightning_d9m.lightning.callback",
    "DigestError": "lightning_d9m.errors",
    "DriftError": "lightning_d9m.errors",
    "FixedShape": "lightning_d9m.audit.inference.fixed_batch",
    "HorovodDeterministicStrategy": "lightning_d9m.horovod.strategy",
    "InexactResumeError": "lightning_d9m.errors",
    "LedgerError": "lightning_d9m.errors",
    "NotBitExactError": "lightning_d9m.errors",
    "PerSample": "lightning_d9m.audit.inference.fixed_batch",
    "RankLostError": "lightning_d9m.errors",
    "RanksDisagreeError": "lightning_d9m.errors",
    "ReferenceRefusedError": "lightning_d9m.errors",
    "Session": "lightning_d9m.control.session",
    "SettingError": "lightning_d9m.errors",
    "Settings": "lightning_d9m.control.settings",
    "StackDifferenceError": "lightning_d9m.errors",
    "TooLateError": "lightning_d9m.errors",
    "assert_bit_exact": "lightning_d9m.testing",
    "deterministic": "lightning_d9m.control.session",
    "digest": "lightning_d9m.hashing.digest",
    "enable": "lightning_d9m.control.session",
}

__all__ = [
    "CheckpointError",
    "D9mError",
    "DeterminismCallback",
    "DigestError",
    "DriftError",
    "FixedShape",
    "HorovodDeterministicStrategy",
    "InexactResumeError",
    "LedgerError",
    "NotBitExactError",
    "PerSample",
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
        return import_module("lightning_d9m.probe")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
