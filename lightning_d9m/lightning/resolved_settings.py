"""Settings of a Trainer's run: its own, inherited, or default."""

import os
from dataclasses import fields, replace

from lightning_d9m.control.session import active_session
from lightning_d9m.control.settings import HIGHEST_SEED, Settings
from lightning_d9m.errors import SettingError


def resolve_seed(seed: int | None) -> int:
    """Return the seed to use: the one given, the active session's, ``PL_GLOBAL_SEED``'s, or 0.

    Raises:
        SettingError: When ``PL_GLOBAL_SEED`` is no seed.
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
            f"The variable PL_GLOBAL_SEED is {text!r}, which is no seed. Set it to a whole number "
            f"from 0 to {HIGHEST_SEED}, or give DeterminismCallback(seed=...)."
        )
    return value


def inherit_settings(settings: Settings) -> Settings:
    """Return settings in which what is left at its default is that of the active session.

    Its switches stay on during the run, so the ledger has to name them.
    """
    session = active_session()
    if session is None:
        return settings
    default = Settings()
    inherited = {
        field.name: getattr(session.settings, field.name)
        for field in fields(Settings)
        if field.name != "seed" and getattr(settings, field.name) == getattr(default, field.name)
    }
    return replace(settings, **inherited)
