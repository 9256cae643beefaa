"""Settings of a deterministic session. This module does not import torch."""

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from runpy import run_path

from lightning_d9m.control.env_settings import read_switch, read_variable
from lightning_d9m.errors import SettingError
from lightning_d9m.patches.catalog.catalog import find_op
from lightning_d9m.portability import is_portable

# The range of Lightning's `seed_everything`, so that one number serves both.
HIGHEST_SEED = 2**32 - 1
HIGHEST_THREADS = 4096


def _torch_is_built_for_cuda() -> bool:
    """Return whether torch was built for CUDA; neither import it nor start the driver."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return torch.version.cuda is not None
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    return run_path(str(Path(spec.origin).with_name("version.py"))).get("cuda") is not None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a deterministic session.

    Attributes:
        seed: Base of every seed, from 0 to 4294967295.
        per_sample_rng: Seed the random generators for every sample by (seed, epoch, index), so
            that its draws do not depend on its batch; otherwise seed them for every batch.
        threads: Number of intra-op CPU threads to pin, from 1; None keeps the current number.
        fill_uninitialized_memory: Fill new tensors, so that a program that reads uninitialized
            memory is exact too. It does not change the results of a correct program.
        patch_ops: On a CUDA machine, replace the operations that torch leaves nondeterministic;
            see ``d9m ops``. Without it, torch raises where it has no deterministic kernel. The
            default is True if torch was built for CUDA.
        unpatched_ops: Names of operations that torch computes anyway.
        portable: Compute every operation so that the bits are the same on every machine, several
            times slower; see ``docs/portable.md``. The default is True if the variables
            ``LIGHTNING_D9M`` and ``LIGHTNING_D9M_PORTABLE`` are 1.

    Raises:
        SettingError: If a value is not allowed.
    """

    seed: int = 0
    per_sample_rng: bool = False
    threads: int | None = None
    fill_uninitialized_memory: bool = True
    patch_ops: bool = field(default_factory=_torch_is_built_for_cuda)
    unpatched_ops: tuple[str, ...] = ()
    portable: bool = field(
        default_factory=lambda: (
            read_switch(os.environ)
            and bool(read_variable("LIGHTNING_D9M_PORTABLE", os.environ, bool))
        )
    )

    def __post_init__(self) -> None:
        _validate_integer("seed", self.seed, 0, HIGHEST_SEED)
        if self.threads is not None:
            _validate_integer("threads", self.threads, 1, HIGHEST_THREADS)
        for name in ("per_sample_rng", "fill_uninitialized_memory", "patch_ops", "portable"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise SettingError(f"{name} is {value!r}; allowed: True or False.")
        if self.unpatched_ops and not self.patch_ops:
            raise SettingError(
                f"unpatched_ops is {list(self.unpatched_ops)} and patch_ops is off, so nothing is "
                "patched. Switch patch_ops on, or leave unpatched_ops out."
            )
        for name in self.unpatched_ops:
            find_op(name)  # raises for a misspelled name

    def as_record(self) -> dict[str, int | bool | str | None]:
        """Return the settings as the ledger stores them; one that is off by default only if on."""
        record = asdict(self) | {"unpatched_ops": " ".join(sorted(self.unpatched_ops))}
        record["portable"] = self.portable or is_portable()  # which may have been entered before
        if record["portable"]:  # the same on every machine, whatever torch was built for
            record |= {"patch_ops": False, "unpatched_ops": ""}
        return {name: value for name, value in record.items() if name != "portable" or value}


def validate_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """Raise a ``SettingError`` if a setting is not one of the allowed words."""
    if value not in allowed:
        raise SettingError(f"{name} is {value!r}; allowed: {' or '.join(map(repr, allowed))}.")


def read_path(name: str, value: object) -> Path | None:
    """Return a setting as a path; None for None. Anything else is a ``SettingError``."""
    if value is None:
        return None
    if not isinstance(value, str | PathLike):
        raise SettingError(f"{name} is {value!r}; allowed: a path, or None for none.")
    return Path(value)


def _validate_integer(name: str, value: object, low: int, high: int) -> None:
    # True is an int in Python, and surely a mistake as a seed.
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise SettingError(f"{name} is {value!r}; allowed: a whole number from {low} to {high}.")
