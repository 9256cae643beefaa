"""Entry points that torch and Lightning call; what they do is in ``lightning_d9m``.

An editable installation copies this file and refers to the folder of the package. Where the folder
was moved, these functions can still be imported: an entry point that cannot be imported ends every
program that imports torch.
"""

import os
import sys
from typing import Any

_SWITCHES = ("LIGHTNING_D9M", "LIGHTNING_D9M_PORTABLE")
_REMEDY = (
    "If its folder was moved, install it again with `pip install -e FOLDER`; to do without it, "
    "`pip uninstall lightning-d9m`."
)


def load() -> None:
    """Open a session if a variable asks for it; torch calls this at the end of its import."""
    if not _is_set(*_SWITCHES, "LIGHTNING_D9M_WATCH"):
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


def _is_set(*names: str) -> bool:
    return any(os.environ.get(name, "") not in ("", "0") for name in names)
