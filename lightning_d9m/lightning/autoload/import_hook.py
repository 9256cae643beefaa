"""An import hook: call a function right after a module is imported for the first time."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
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
            spec.loader = _Loader(spec.loader, self._func)
        return spec


class _Loader(Loader):
    """Loads a module with its own loader, then calls the function."""

    def __init__(self, original: Loader, func: Callable[[], None]) -> None:
        self._original = original
        self._func = func

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._original.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module must not see this loader: `inspect` and others use more of a loader's methods.
        module.__loader__ = self._original
        if module.__spec__ is not None:
            module.__spec__.loader = self._original
        self._original.exec_module(module)
        self._func()
