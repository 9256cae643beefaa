"""The settings of a Trainer's run: given to the callback, inherited, or the defaults."""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_d9m.control.session import active_session
from lightning_d9m.control.settings import HIGHEST_SEED, Settings
from lightning_d9m.errors import SettingError


def select_given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the callback that are ``Settings``; None means not given.

    Raises:
        SettingError: If a value is not allowed.
    """
    found = {name: arguments.get(name) for name in Settings.__dataclass_fields__}
    given: dict[str, Any] = {name: value for name, value in found.items() if value is not None}
    if names := given.get("unpatched_ops"):
        given["unpatched_ops"] = (names,) if isinstance(names, str) else tuple(names)
    replace(Settings(), **given)
    return given


def resolve_settings(given: Mapping[str, Any], threads: int | None = None) -> Settings:
    """Return the settings of a run that begins now.

    A setting that was not given is that of the active session, whose switches stay on during the
    run and therefore belong in the ledger. ``threads`` is their number if it is neither given nor
    inherited.

    Raises:
        SettingError: If ``PL_GLOBAL_SEED`` is not a seed, or the active session has a switch on
            that this run must not have.
    """
    session = active_session()
    inherited = Settings() if session is None else session.settings
    for name, effect in (
        ("patch_ops", "has patched the operations already"),
        ("portable", "computes portable bits"),
    ):
        if getattr(inherited, name) and given.get(name) is False:
            raise SettingError(
                f"{name} is False, but the active session of lightning_d9m.enable() {effect}. "
                f"Leave {name} out here, or call enable({name}=False)."
            )
    if inherited.threads is None:
        inherited = replace(inherited, threads=threads)
    return replace(inherited, **{**given, "seed": resolve_seed(given.get("seed"))})


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
