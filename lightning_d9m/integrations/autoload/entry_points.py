"""Entry points for ``LIGHTNING_D9M=1 python train.py``, which needs no change to the program.

pyproject.toml declares two. ``lightning_d9m_autoload.py`` has them, and imports this module only if
a variable is set:

- ``torch.backends``: torch calls :func:`load` at the end of its own import, before the program can
  build a model. It opens a session, as ``lightning_d9m.enable()`` at the top of the program would,
  and registers ``strategy="horovod_d9m"`` as soon as Lightning's registry exists.
- ``*.callbacks_factory``: Lightning calls it when a Trainer is built and adds the callbacks that it
  returns. Lightning documents this entry point; wrapping ``Trainer.__init__`` would depend on
  Lightning's internals. If the session could not be opened at import, this entry point raises, so
  the run never trains unseeded.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

from lightning_d9m.integrations.trainer.packages import PACKAGES

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_OFF = ("", "0")


class _AutoloadState:
    """The state of this process: it has opened a session, or an error has prevented that."""

    started = False
    problem: Exception | None = None
    unsupported: ClassVar[dict[str, str]] = {}  # why a package is too old; empty if it is not


def load() -> None:
    """Open a session if ``LIGHTNING_D9M`` is on; called while torch is imported, it never raises.

    ``LIGHTNING_D9M_PORTABLE`` alone turns it on.
    """
    if os.environ.get("LIGHTNING_D9M_PORTABLE", "").lower() in ("1", "true", "yes", "on"):
        os.environ.setdefault("LIGHTNING_D9M", "1")
    if os.environ.get("LIGHTNING_D9M", "") not in _OFF:
        _attempt(_start)
    if os.environ.get("LIGHTNING_D9M_WATCH"):
        _attempt(_watch)


def _watch() -> None:
    from lightning_d9m.engine.probes.outside import watch_process

    watch_process()


def _attempt(func: Callable[[], None]) -> None:
    """Call a function; print and keep its error, so that the program's imports do not fail."""
    try:
        func()
    except Exception as error:  # noqa: BLE001 - raised when a Trainer is built
        if _AutoloadState.problem is None:
            _say(
                f"{_describe_error(error)} This process continues without it, and building a "
                "Trainer will fail."
            )
        _AutoloadState.problem = error


def _say(reason: str, effect: str = "has no effect") -> None:
    value = os.environ.get("LIGHTNING_D9M")
    # Logging is not configured while torch is imported, and a warning could be an error by `-W
    # error`.
    print(f"lightning_d9m: LIGHTNING_D9M={value} {effect}: {reason}", file=sys.stderr)


def _is_unsupported(package: str = "torch") -> bool:
    """Warn once if a package that the program uses is too old; it then runs without us."""
    from lightning_d9m.compatibility import describe_unsupported

    known = _AutoloadState.unsupported
    if package not in known:
        known[package] = describe_unsupported(package) or ""
        # With torch alone the session is open already: a program may use both.
        effect = "has no effect" if package == "torch" else "adds no callback to a Trainer"
        if known[package]:
            _say(known[package], effect)
    return bool(known[package])


def _start() -> None:
    from lightning_d9m.engine.control.settings import RECORD_SAVES, read_switch, read_variable

    if not read_switch(os.environ) or _is_unsupported():
        return
    for package in PACKAGES:
        register = partial(_attempt, partial(_register, package))
        # To import Lightning here would take seconds in programs without it.
        call_after_import(f"{package}.strategies", register)
    _open_session()
    from lightning_d9m.engine.recording.interruption import is_segment
    from lightning_d9m.integrations.loop.optimizer_steps import OptimizerSteps

    OptimizerSteps().install()  # for a program without a Trainer, whose callback has precedence
    # A segment must not write files of the earlier run.
    if is_segment() or read_variable(RECORD_SAVES, os.environ, bool):
        from lightning_d9m.integrations.loop.saved_files import SavedFiles

        SavedFiles().install(call_after_import)


def _open_session() -> None:
    from lightning_d9m.engine.control.session import active_session, enable
    from lightning_d9m.engine.control.settings import Settings, build_from_variables, read_settings

    settings = read_settings(Settings, os.environ)
    if active_session() is None:  # else the program has called `enable` itself
        session = enable(build_from_variables(Settings, settings))
        # `PL_GLOBAL_SEED` then takes precedence over the default, see `resolve_seed`.
        session.seed_is_default = "seed" not in settings
    _AutoloadState.started = True


def _register(package: str) -> None:
    """Register our strategies with a Lightning package, unless it is too old."""
    if _is_unsupported(package):
        return
    from lightning_d9m.integrations.strategies.strategies import register_strategies

    register_strategies(package)


def make_callbacks(package: str) -> list[Any]:
    """Return the callbacks to add to a Trainer of a package of Lightning.

    Raises:
        SettingError: If the session could not be opened, or a variable has a value that is not
            allowed.
        TooLateError: If no session was opened before the program could build a model.
    """
    value = os.environ.get("LIGHTNING_D9M", "")
    if value in _OFF:
        return []
    from lightning_d9m.errors import SettingError, TooLateError

    try:
        return _find_callbacks(package)
    except TooLateError:
        raise
    except Exception as error:
        raise SettingError(
            f"LIGHTNING_D9M={value} asks for a deterministic run, which is not possible: "
            f"{_describe_error(error)} Correct this, or unset LIGHTNING_D9M to train without it."
        ) from error


def _find_callbacks(package: str) -> list[Any]:
    if _AutoloadState.problem is not None:
        raise _AutoloadState.problem
    from lightning_d9m.engine.control.session import active_session
    from lightning_d9m.engine.control.settings import read_switch
    from lightning_d9m.errors import TooLateError

    started = _AutoloadState.started or active_session() is not None
    is_old = (not started and _is_unsupported()) or _is_unsupported(package)
    if not read_switch(os.environ) or is_old:
        return []
    if not started:
        raise TooLateError(
            f"LIGHTNING_D9M={os.environ['LIGHTNING_D9M']} asks for a seed before the model is "
            "built, and lightning_d9m was not called when torch was imported: "
            "TORCH_DEVICE_BACKEND_AUTOLOAD is 0, or LIGHTNING_D9M was set after torch was "
            "imported. Set it before the program starts and leave the other out; or unset it, and "
            "call lightning_d9m.enable() at the top of the program and give "
            "Trainer(callbacks=[lightning_d9m.DeterminismCallback()])."
        )
    from lightning_d9m.integrations.lightning.callback import make_callback

    return [make_callback(package)]


def _describe_error(error: Exception) -> str:
    """Return an error's message, with its type if another library raised it."""
    text = str(error) or "no reason is given"
    # By name: a broken installation may lack the module that defines ours.
    is_ours = type(error).__module__ == "lightning_d9m.errors"
    text = text if is_ours else f"{type(error).__name__}: {text}"
    return text if text.endswith((".", "!", "?", ")")) else f"{text}."


def call_after_import(name: str, func: Callable[[], None]) -> None:
    """Call ``func`` once, immediately if the module ``name`` has been imported.

    ``func`` must not raise: its error would come out of the program's ``import``.
    """
    if name in sys.modules:
        func()
    else:
        # First, because the finder that loads the module ends the search.
        sys.meta_path.insert(0, _Finder(name, func))


class _Finder:
    """Finds one module, until it was executed, with the other finders in ``sys.meta_path``."""

    def __init__(self, name: str, func: Callable[[], None]) -> None:
        self._name = name
        self._func = func

    def find_spec(self, fullname: str, *_: object) -> "ModuleSpec | None":
        if fullname != self._name:
            return None
        # Before the search continues, or it would find this finder again.
        sys.meta_path.remove(self)
        try:
            spec = find_spec(fullname)
        finally:  # a program may only look whether the module exists
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            # On the module's own loader, which `inspect` and others use later.
            load = spec.loader.exec_module

            def load_and_call(module: "ModuleType") -> None:
                # The loader is then as it was, even if the module raises.
                vars(spec.loader).pop("exec_module", None)
                load(module)
                if self in sys.meta_path:  # no other spec of it was executed before
                    sys.meta_path.remove(self)
                    self._func()

            vars(spec.loader)["exec_module"] = load_and_call
        return spec
