"""Entry points that torch and Lightning call; what they do is in ``lightning_d9m``.

An editable installation copies this file and refers to the folder of the package. Where the folder
was moved, these functions can still be imported: an entry point that cannot be imported ends every
program that imports torch.
"""

import os
import sys
from pathlib import Path
from typing import Any

_SWITCHES = ("LIGHTNING_D9M", "LIGHTNING_D9M_PORTABLE")
_REMEDY = (
    "If its folder was moved, install it again with `pip install -e FOLDER`; to do without it, "
    "`pip uninstall lightning-d9m`."
)


def load_torch() -> None:
    """Import torch, which calls ``load``, if a variable asks for a session.

    The package calls this first. If torch were imported by a module of it, such as that of the
    recorder, ``load`` could import nothing from this module, which would not be complete.
    """
    if _is_set(*_SWITCHES) and not _is_command():
        import torch  # noqa: F401 - nothing else may load it


def load() -> None:
    """Open a session if a variable asks for it; torch calls this at the end of its import."""
    if not _is_set(*_SWITCHES, "LIGHTNING_D9M_WATCH") or _is_command():
        return
    try:
        from lightning_d9m.integrations.autoload import entry_points
    except ImportError as error:
        print(  # noqa: T201 - torch gives no other way
            f"lightning_d9m cannot be imported and has no effect: {error}. {_REMEDY}",
            file=sys.stderr,
        )
    else:
        entry_points.load()


def make_lightning_callbacks() -> list[Any]:
    """Return the callbacks to add to a ``lightning.pytorch.Trainer``."""
    return _make_callbacks("lightning.pytorch")


def make_pytorch_lightning_callbacks() -> list[Any]:
    """Return the callbacks to add to a ``pytorch_lightning.Trainer``."""
    return _make_callbacks("pytorch_lightning")


def _make_callbacks(package: str) -> list[Any]:
    if not _is_set(*_SWITCHES):
        return []
    try:
        from lightning_d9m.integrations.autoload import entry_points
    except ImportError as error:
        raise ImportError(
            "LIGHTNING_D9M=1 asks for a deterministic run, and lightning_d9m cannot be imported: "
            f"{error}. {_REMEDY}"
        ) from error
    return entry_points.make_callbacks(package)


def _is_command() -> bool:
    """Return whether this process is a command of ours, which trains nothing itself."""
    # While Python looks for a module of ours that it should run, its name is "-m".
    names = Path(*sys.argv[:1]).parts[-2:]
    return names == ("lightning_d9m", "__main__.py") or names[-1:] in (
        ("-m",),
        ("d9m",),
        ("d9m.exe",),
    )


def _is_set(*names: str) -> bool:
    return any(os.environ.get(name, "") not in ("", "0") for name in names)
