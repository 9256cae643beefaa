"""The settings of a Trainer's run: given to the callback, inherited, or the defaults."""

import os
from dataclasses import dataclass, fields, replace
from typing import Any

from lightning_d9m.control.session import active_session
from lightning_d9m.control.settings import HIGHEST_SEED, Settings
from lightning_d9m.errors import SettingError


@dataclass(frozen=True, kw_only=True)
class GivenSettings:
    """The callback's arguments among the ``Settings``; None means that one was not given.

    Raises:
        SettingError: If a value is not allowed.
    """

    seed: int | None = None
    per_sample_rng: bool | None = None
    threads: int | None = None
    fill_uninitialized_memory: bool | None = None
    patch_ops: bool | None = None
    unpatched_ops: tuple[str, ...] | None = None
    portable: bool | None = None

    def __post_init__(self) -> None:
        replace(Settings(), **self._given())

    def resolve(self, threads: int | None = None) -> Settings:
        """Return the settings of a run that begins now.

        A setting that was not given is that of the active session, whose switches stay on during
        the run and therefore belong in the ledger.

        ``threads`` is their number if it is neither given nor inherited.

        Raises:
            SettingError: If ``PL_GLOBAL_SEED`` is not a seed, or the active session has patched
                operations that this run must not patch.
        """
        session = active_session()
        inherited = Settings() if session is None else session.settings
        if inherited.patch_ops and self.patch_ops is False:
            raise SettingError(
                "patch_ops is False, but the active session of lightning_d9m.enable() has patched "
                "the operations already. Leave patch_ops out here, or call enable(patch_ops=False)."
            )
        if inherited.portable and self.portable is False:
            raise SettingError(
                "portable is False, but the active session of lightning_d9m.enable() computes "
                "portable bits. Leave portable out here, or call enable(portable=False)."
            )
        if inherited.threads is None:
            inherited = replace(inherited, threads=threads)
        return replace(inherited, **(self._given() | {"seed": resolve_seed(self.seed)}))

    def _given(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


def resolve_seed(seed: int | None) -> int:
    """Return the seed to use: the one given, the active session's, ``PL_GLOBAL_SEED``'s, or 0.

    Raises:
        SettingError: If ``PL_GLOBAL_SEED`` is not a seed.
    """
    if seed is not None:
        return seed
    session = active_session()
    if session is not None and not session.seed_is_default:
        return session.settings.seed
    text = os.environ.get("PL_GLOBAL_SEED") or "0"
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value <= HIGHEST_SEED:
        raise SettingError(
            f"The variable PL_GLOBAL_SEED is {text!r}, which is not a seed. Set it to a whole "
            f"number from 0 to {HIGHEST_SEED}, or pass DeterminismCallback(seed=...)."
        )
    return value
