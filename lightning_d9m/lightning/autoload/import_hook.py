"""Do something right after a module has been imported for the first time, whoever imports it."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


def call_after_import(name: str, act: Callable[[], None]) -> None:
    """Call ``act`` once, at once when the module ``name`` is imported already.

    Args:
        name: The module's full name.
        act: Must not raise: the error would be that of the program's `import`.
    """
    if name in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _Finder(name, act))


class _Finder(MetaPathFinder):
    """Finds one module, once, by asking the finders after it; knows no other module."""

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self._name = name
        self._act = act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._act)
        return spec


class _Loader(Loader):
    """Lets the module's own loader do its work, and acts when it is done."""

    def __init__(self, original: Loader, act: Callable[[], None]) -> None:
        self._original = original
        self._act = act

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._original.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module never sees this loader: `inspect` and others ask a loader for more.
        module.__loader__ = self._original
        if module.__spec__ is not None:
            module.__spec__.loader = self._original
        self._original.exec_module(module)
        self._act()
