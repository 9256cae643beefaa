"""Support for both of Lightning's packages.

``lightning.pytorch`` and ``pytorch_lightning`` hold the same code, with separate base classes, and
both may be installed. Importing a package that the program does not use would take seconds, so the
packages that are already loaded are served.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def loaded_packages() -> tuple[str, ...]:
    """Return the Lightning packages that the program has imported."""
    return tuple(name for name in PACKAGES if sys.modules.get(name) is not None)


def rank_zero() -> ModuleType:
    """Return the ``rank_zero`` module of the Lightning package that the program uses."""
    return import_module(f"{loaded_packages()[0]}.utilities.rank_zero")


def import_packages() -> tuple[str, ...]:
    """Return the packages to serve: those loaded, or else the first that is installed.

    Raises:
        ImportError: If neither is installed.
    """
    names = loaded_packages()
    if names:
        return names
    for name in PACKAGES:
        if find_spec(name.partition(".")[0]) is not None:
            import_module(name)
            return (name,)
    raise ImportError(
        "lightning_d9m's callback and strategy need PyTorch Lightning, and neither `lightning` nor "
        "`pytorch-lightning` is installed. Install one: pip install lightning. Without Lightning, "
        "use `with lightning_d9m.deterministic(seed=...):`."
    )


def combined_base(name: str) -> type:
    """Return a base class that derives from the class of this name in every package served.

    The name is that of module and class, such as ``"callbacks.Callback"``.
    """
    bases = _list_bases(name)
    if len(bases) == 1:
        return bases[0]
    return type(name.rpartition(".")[2], bases, {"__module__": __name__})


def extend_base(kind: type, name: str) -> None:
    """Let a class that has a combined base derive from packages that were imported later, too."""
    if not all(issubclass(kind, base) for base in _list_bases(name)):
        kind.__bases__ = (combined_base(name),)


def _list_bases(name: str) -> tuple[type, ...]:
    module, _, attribute = name.rpartition(".")
    return tuple(
        getattr(import_module(f"{package}.{module}"), attribute) for package in import_packages()
    )
