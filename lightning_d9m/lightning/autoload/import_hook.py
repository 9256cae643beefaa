"""An import hook: call a function right after a module is imported for the first time."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


def call_after_import(name: str, func: Callable[[], None]) -> None:
    """Call ``func`` once, immediately if the module ``name`` has been imported.

    ``func`` must not raise: its error would come out of the program's ``import``.
    """
    if name in sys.modules:
        func()
    else:
        sys.meta_path.insert(0, _Finder(name, func))


class _Finder(MetaPathFinder):
    """Finds one module, once, with the finders after it in ``sys.meta_path``."""

    def __init__(self, name: str, func: Callable[[], None]) -> None:
        self._name = name
        self._func = func

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            # On the module's own loader, which `inspect` and others use later.
            load = spec.loader.exec_module

            def load_and_call(module: ModuleType) -> None:
                del vars(spec.loader)["exec_module"]
                load(module)
                self._func()

            vars(spec.loader)["exec_module"] = load_and_call
        return spec
