"""A deterministic session sets all flags, variables and seeds, and restores them.

``with deterministic(seed=1):``, ``enable(seed=1)`` and the callback open the same session.
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from lightning_d9m.attribute_patches import replace_method
from lightning_d9m.compatibility import can_patch
from lightning_d9m.engine.control.environment import (
    CONTROL,
    EarlyVariables,
    algorithms_switched,
    control_is_on,
    find_changed_flags,
    restore_flags,
    threads_pinned,
    wanted_flags,
)
from lightning_d9m.engine.control.seed_calls import seed_calls
from lightning_d9m.engine.control.seeding import rng_restored, seed_all
from lightning_d9m.engine.control.settings import Settings
from lightning_d9m.errors import SettingError
from lightning_d9m.hooks import check_hooks
from lightning_d9m.ops.portability import is_portable

if TYPE_CHECKING:
    from typing_extensions import Self

_open: list["Session"] = []
# Held while a session opens or closes: flags, variables and generators belong to the process.
_lock = threading.RLock()
_MOST_SEEDS = 1000  # a program may give another seed in each step


@dataclass
class FitCount:
    """The numbers of fits, of a session or of the process.

    Attributes:
        next: Number of the next fit.
        unused: A number that no fit before the last seeding had.
        first: The number of the first fit after each of the last seeds that the program gave.
    """

    next: int = 0
    unused: int = 0
    first: dict[int, int] = field(default_factory=dict)

    def note_seed(self, seed: int) -> None:
        """Number the next fit as the first after an earlier call with this seed, or as new."""
        self.unused = max(self.unused, self.next)
        self.first[seed] = self.next = self.first.pop(seed, self.unused)
        if len(self.first) > _MOST_SEEDS:
            del self.first[next(iter(self.first))]


_of_process = FitCount()


class Session:
    """The deterministic state of this process, from the constructor to ``close``.

    Attributes:
        settings: The settings.
        fits: The numbers of the fits that begin while it is the active session.
        thread: The thread that opened it.
        scopes: How many ``with`` blocks hold it open.
        in_trainer: Whether a Trainer opened it for a run.
        seed_is_default: True if the seed is the default, so that a Trainer may choose another one.

    Raises:
        SettingError: If a variable of the user allows nondeterminism, or another thread holds a
            session open.
        TooLateError: If a variable can no longer take effect.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.fits = FitCount()
        self.in_trainer = False
        self.seed_is_default = False
        self.thread = threading.current_thread()
        self.scopes = 0
        self._is_over = False  # its last block has ended while a later session was open
        self._switching = control_is_on()
        fill = settings.fill_uninitialized_memory
        self._flags = wanted_flags(fill_uninitialized_memory=fill)
        if not self._switching:
            warnings.warn(
                f"The variable {CONTROL} is 'off': this run is seeded and recorded, but not "
                "deterministic. Unset it unless you measure the cost of determinism.",
                stacklevel=2,
            )
        # Before anything is changed: nothing has to be restored if a library lacks a name.
        check_hooks()
        # Everything that follows is undone in reverse order, even if a later line raises. Variables
        # come first, because libraries that a flag or a seed starts read them; seeds come last, so
        # that nothing draws between them and the program.
        with _lock, ExitStack() as stack:
            _refuse_other_threads()
            variables = EarlyVariables()
            variables.set()
            stack.callback(variables.restore)
            stack.enter_context(threads_pinned(settings.threads))
            if self._switching:
                stack.enter_context(algorithms_switched(self._flags))
                if settings.portable:
                    # Slow to import: only for those who ask for it.
                    from lightning_d9m.ops.portability.mode import portable

                    stack.enter_context(portable())
                if torch.backends.cuda.is_built():
                    _enter_kernels(stack, settings)
            if not _open:
                stack.enter_context(_workers_follow())
            stack.enter_context(rng_restored())
            stack.callback(seed_calls.install(_note_seed))
            seed_all(settings.seed)
            self._stack = stack.pop_all()
            _open.append(self)

    def verify(self) -> None:
        """Raise a ``SettingError`` if a flag or the number of threads has changed since."""
        changed = find_changed_flags(self._flags) if self._switching else {}
        for name, value in changed.items():
            raise SettingError(
                f"The flag {name} is {value} and was set to {self._flags[name]}: something changed "
                "it during the run, so the run is not deterministic. Look for "
                "torch.use_deterministic_algorithms, torch.backends.cudnn or "
                "Trainer(deterministic=...) in the program, and remove it."
            )
        actual, pinned = torch.get_num_threads(), self.settings.threads
        if pinned not in (None, actual):
            raise SettingError(
                f"{actual} CPU threads are in use, and {pinned} were pinned: something changed the "
                "number during the run, and results differ with it. Look for "
                "torch.set_num_threads in the program, and remove it."
            )

    def switch_again(self) -> list[str]:
        """Set the flags that have changed since again, and return their names."""
        changed = find_changed_flags(self._flags) if self._switching else ()
        if changed:
            restore_flags(self._flags)
        return [*changed]

    def call_on_close(self, func: Callable[[], object]) -> None:
        """Call a function when the session closes, before it restores anything."""
        self._stack.callback(func)

    def close(self) -> None:
        """Restore everything in reverse order, including generators. A second call does nothing.

        Sessions that ``enable`` opened later and left open are closed first.

        Raises:
            SettingError: If a ``with`` block that began later still holds its session open.
        """
        with _lock:
            try:
                while self in _open:
                    # `enable` in a cell of a notebook leaves its session open; a block does not.
                    if _open[-1] is not self and _open[-1].scopes:
                        raise SettingError(
                            "A session that was opened later is still open and would restore the "
                            "wrong flags. Close sessions in reverse order, or use `with "
                            "deterministic(...)`."
                        )
                    _open.pop()._stack.close()  # noqa: SLF001 - this class
            finally:
                # Blocks may end in another order than they began, as those of generators do.
                if _open and _open[-1]._is_over:  # noqa: SLF001 - this class
                    _open[-1].close()

    def __enter__(self) -> "Self":
        if self not in _open:
            raise SettingError(
                "This session is closed, and a block within it would not be deterministic. Open "
                "a session for each block: `with deterministic(...)`."
            )
        self.scopes += 1
        self._is_over = False  # a later session may have kept it open
        return self

    def __exit__(self, *_: object) -> None:
        # Another thread would open a session between the end of this block and its close.
        with _lock:
            self.scopes -= 1
            if self.scopes == 0:
                self._is_over = True
                self.close()


def _refuse_other_threads() -> None:
    """Raise a ``SettingError`` if a ``with`` block of another thread holds a session open."""
    thread = threading.current_thread()
    for session in _open:
        # After a fork the threads of the parent process are not alive.
        if session.scopes and session.thread is not thread and session.thread.is_alive():
            raise SettingError(
                f"A deterministic session or run is open in thread {session.thread.name!r}, so "
                f"thread {thread.name!r} cannot open another one: the threads of a process share "
                "its random generators and torch's flags. Run one after the other, or each in its "
                "own process."
            )


def _enter_kernels(stack: ExitStack, settings: Settings) -> None:
    """Patch operations, and let those vary that may, on a machine whose torch has CUDA kernels."""
    # Loaded here: torch built for a CPU has nothing to patch.
    from lightning_d9m.ops.patches.registration import (
        is_patched,
        patches_applied,
        variation_allowed,
    )

    # This does not start the driver, after which a launcher could no longer fork. Portable bits
    # have replaced the operations already.
    if settings.patch_ops and not settings.portable and not _is_patched(settings) and can_patch():
        varying = (op for op in settings.varying_ops if is_patched(op))
        exclude = (*settings.unpatched_ops, *varying)
        stack.enter_context(patches_applied("CUDA", exclude=exclude))
    stack.enter_context(variation_allowed(settings.varying_ops, "CUDA"))


def _is_patched(settings: Settings) -> bool:
    """Return whether an open session has patched the operations of these settings."""
    for session in _open:
        if session.settings.patch_ops:
            expected, actual = session.settings.unpatched_ops, settings.unpatched_ops
            if set(expected) != set(actual):
                raise SettingError(
                    f"unpatched_ops is {sorted(actual)}, but an outer session that has patched the "
                    f"operations leaves out {sorted(expected)}. Give both the same, or close the "
                    "outer session first."
                )
            return True
    return False


def enable(settings: Settings | None = None, **overrides: Any) -> Session:
    """Make this process deterministic; call it at the top of the program.

    Every generator gets the seed itself, as with ``torch.manual_seed(seed)``. The session stays
    open until its ``close`` or the end of the program. A second call closes the session of the
    first one, so that you can run a cell of a notebook again. Within the ``with`` block of a
    session or a Trainer's run it opens an inner session, which ends with the outer one.

    Args:
        settings: All settings; the defaults when None.
        overrides: Single settings by name, such as ``seed=42``.

    Raises:
        SettingError: If a value or a name is not allowed.
        TooLateError: If a variable can no longer take effect.

    Examples:
        >>> import torch
        >>> with enable(seed=1):
        ...     torch.are_deterministic_algorithms_enabled()
        True
    """
    chosen = _choose(settings, overrides)
    with _lock:
        last = active_session()
        if last is not None and not last.scopes:
            last.close()
        _refuse_plain_bits(overrides)
        return Session(chosen)


@contextmanager
def deterministic(settings: Settings | None = None, **overrides: Any) -> Iterator[Session]:
    """Run the body in a deterministic session, with the arguments of ``enable``."""
    chosen = _choose(settings, overrides)
    with ExitStack() as stack:
        # Another thread's `enable` must not find the session before the block holds it open.
        with _lock:
            _refuse_plain_bits(overrides)
            session = stack.enter_context(Session(chosen))
        yield session


def _refuse_plain_bits(overrides: dict[str, Any]) -> None:
    """Raise a ``SettingError`` for a session that must leave the portable bits of an outer one."""
    if overrides.get("portable") is False and is_portable():
        raise SettingError(
            "portable is False, but an outer session or portable() computes portable bits, which "
            "an inner session cannot leave. Leave portable out here, or end the outer one first."
        )


def _choose(settings: Settings | None, overrides: dict[str, Any]) -> Settings:
    if settings is not None and not isinstance(settings, Settings):
        raise SettingError(
            f"settings is {settings!r}; allowed: a lightning_d9m.Settings. Single settings are "
            "given by name, such as enable(seed=42)."
        )
    unknown = ", ".join(sorted(set(overrides) - set(Settings.__dataclass_fields__)))
    if unknown:
        names = ", ".join(Settings.__dataclass_fields__)
        raise SettingError(f"There is no setting {unknown}; the settings are {names}.")
    return replace(settings or Settings(), **overrides)


def active_session() -> Session | None:
    """Return the innermost open session."""
    return _open[-1] if _open else None


def next_fit() -> int:
    """Count a fit; return its number, from 0, in the active session or else in the process.

    Two fits in one session draw different numbers, and each equals its counterpart in another run.
    Each session counts from 0: ``with deterministic(seed=1)`` around a fit repeats the same fit.

    Raises:
        SettingError: If another thread holds a session open.
    """
    with _lock:
        _refuse_other_threads()
        fits = _find_count()
        fits.next += 1
        return fits.next - 1


def _note_seed(seed: int) -> None:
    """Let a call of the program that seeds torch's generators number the next fit.

    Within a Trainer's run a program may seed as it likes: the run has its number.
    """
    session = active_session()
    if session is None:
        _of_process.note_seed(seed)
    elif not session.in_trainer and session.settings.repeat_fits:
        session.fits.note_seed(seed)


@cache
def note_seeds() -> None:
    """Note the seeds of the program from now on, where no session is open either.

    The first callback of a process calls this.
    """
    # Until the process ends, because the number of a fit must not depend on when a callback is
    # freed. A program mostly seeds before it makes a callback: torch knows the last seed.
    seed_calls.install(_note_seed)
    if active_session() is None:
        _note_seed(torch.initial_seed())


def give_back_fit(number: int) -> None:
    """Let the next fit have the number of this one, if no other was counted since."""
    # For a fit that trained nothing, as the learning rate finder calls one: with its number the
    # same search, or the training after it, draws the same numbers again.
    with _lock:
        fits = _find_count()
        fits.next -= fits.next - 1 == number


def set_fits(number: int) -> None:
    """Set the number of fits in the active session or else in the process."""
    with _lock:
        _find_count().next = number


def restart_fits() -> None:
    """Forget all fits, in the active session or else in the process: the next one is the first."""
    with _lock:
        counted = _find_count()
        counted.next = counted.unused = 0
        counted.first.clear()
        # As before the first fit of a process: no fit may depend on those that were forgotten.
        if counted is _of_process and note_seeds.cache_info().currsize:
            counted.note_seed(torch.initial_seed())


def _find_count() -> FitCount:
    session = active_session()
    return _of_process if session is None else session.fits


@dataclass(frozen=True)
class InheritedSession:
    """Session and fits of a process, which those that it starts take over.

    It has no settings without an active session.
    """

    settings: Settings | None
    fits: int
    seed_is_default: bool = False
    portable: bool = False


def capture_session() -> InheritedSession:
    """Return what a process that is started now takes over."""
    session = active_session()
    return InheritedSession(
        settings=None if session is None else session.settings,
        fits=_find_count().next,
        seed_is_default=session is not None and session.seed_is_default,
        portable=is_portable(),
    )


# For processes that Lightning's launchers start (ddp_spawn, ddp_notebook) and for loaders' workers.
@contextmanager
def session_inherited(inherited: InheritedSession) -> Iterator[None]:
    """Take over a session during the body, unless one is open here, and the number of fits."""
    with ExitStack() as stack:
        if active_session() is None and inherited.settings is not None:
            session = stack.enter_context(Session(inherited.settings))
            session.seed_is_default = inherited.seed_is_default
        if inherited.portable and not is_portable():
            from lightning_d9m.ops.portability.mode import portable

            stack.enter_context(portable())
        set_fits(inherited.fits)
        yield


def start_worker(
    inherited: InheritedSession, function: Callable[[int], None] | None, worker: int
) -> None:
    """Take over a session in a worker of a loader until the worker ends, then call a function."""
    # A forked worker has the session already. One that is spawned, or that comes from a forkserver,
    # has none.
    if inherited.settings is not None:
        # As torch, which gives each worker one thread.
        inherited = replace(inherited, settings=replace(inherited.settings, threads=None))
    _of_worker.enter_context(session_inherited(inherited))
    if function is not None:
        function(worker)


_of_worker = ExitStack()


@contextmanager
def _workers_follow() -> Iterator[None]:
    """Let the workers that torch's loaders start during the body take over the open session."""
    from torch.utils.data import DataLoader

    # A worker that is spawned imports torch again and has no session, so that its flags would be
    # torch's defaults. The class is patched, because torch starts the workers of any loader here.
    make = DataLoader._get_iterator  # noqa: SLF001 - what makes an iterator, and starts workers

    def make_iterator(loader: Any) -> Any:
        with ExitStack() as stack:
            if loader.num_workers:
                start = partial(start_worker, capture_session(), loader.worker_init_fn)
                replace_method(stack, loader, "worker_init_fn", start)
            return make(loader)

    with ExitStack() as stack:
        replace_method(stack, DataLoader, "_get_iterator", make_iterator)
        yield
