"""The pytest plugin: tests in a deterministic session, and golden ledgers in the repository.

It loads torch only for a test that uses it, or if the setting ``d9m`` is on.
"""

import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from lightning_d9m.errors import D9mError, NotBitExactError, SettingError, TooLateError

if TYPE_CHECKING:
    from lightning_d9m.engine.control.environment import EarlyVariables
    from lightning_d9m.engine.control.session import Session

_MARKER = "deterministic"
_VARIABLES: "pytest.StashKey[EarlyVariables]" = pytest.StashKey()
_GOLDEN: "pytest.StashKey[dict[Path, str]]" = pytest.StashKey()  # the test of each, unless named
_EARLIER = (
    "In pytest: set `d9m = true` in the configuration, so that the variables are set before any "
    "conftest.py is loaded."
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare ``--d9m-update`` and the settings of the configuration file."""
    parser.getgroup("d9m", "deterministic training").addoption(
        "--d9m-update",
        action="store_true",
        help="write new golden ledgers instead of comparing with them",
    )
    parser.addini(
        "d9m",
        "set the variables of deterministic sessions before any conftest.py is loaded",
        type="bool",
        default=False,
    )
    parser.addini(
        "d9m_on_stack_difference",
        "if the bits differ and the golden ledger comes from a different stack: fail or skip",
        default="fail",
    )


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Set the variables that libraries read when they start, before any conftest.py is loaded."""
    if not early_config.getini("d9m"):
        return
    # A conftest.py may import libraries that read the variables, so `pytest_configure` is too late.
    from lightning_d9m.engine.control.environment import EarlyVariables

    # Python's own hash seed is not among them: it would need another interpreter.
    variables = EarlyVariables()
    try:
        variables.set()
    except D9mError as error:
        raise pytest.UsageError(f"d9m: {error}") from error
    early_config.stash[_VARIABLES] = variables


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker, and check the settings."""
    config.stash[_GOLDEN] = {}
    config.addinivalue_line(
        "markers",
        f"{_MARKER}(**settings): run the test and its fixtures, except those of a wider scope, in "
        "a deterministic session; the settings are those of lightning_d9m.enable",
    )
    policy = config.getini("d9m_on_stack_difference")
    if policy not in ("fail", "skip"):
        raise pytest.UsageError(f"d9m_on_stack_difference is {policy!r}; allowed: fail or skip.")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Restore the variables."""
    if _VARIABLES in config.stash:
        config.stash[_VARIABLES].restore()


def pytest_report_header(config: pytest.Config) -> str | None:
    """Report whether the hash seed is fixed, which cannot be changed in a running interpreter."""
    if not config.getini("d9m"):
        return None
    from lightning_d9m.engine.control.settings import describe_hash_seed_problem

    return f"d9m: {describe_hash_seed_problem() or 'the hash seed is fixed'}"


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Seed again when the test itself begins: fixtures may have drawn, and plugins reseeded."""
    session = cast("Session | None", pyfuncitem.funcargs.get("_d9m_session"))
    if session is not None:
        from lightning_d9m.engine.control.seeding import seed_all

        seed_all(session.settings.seed)
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Count fits from 0 in each test, so that its draws do not depend on the tests before it."""
    # First of all plugins, because fixtures may already fit. Without an import, so that tests that
    # do not use torch do not load it.
    if (session := sys.modules.get("lightning_d9m.engine.control.session")) is not None:
        session.restart_fits()


def _read_markers(node: pytest.Item) -> dict[str, Any] | None:
    """Return the settings of a test's markers, the closest first; None without a marker."""
    markers = [*node.iter_markers(_MARKER)]
    settings: dict[str, Any] = {}
    for marker in reversed(markers):
        if marker.args:
            raise SettingError(
                f"The marker {_MARKER} has {marker.args!r}; allowed: settings by name, such as "
                f"@pytest.mark.{_MARKER}(seed=42)."
            )
        settings.update(marker.kwargs)
    return settings if markers else None


@contextmanager
def _session(settings: dict[str, Any]) -> "Iterator[Session]":
    from lightning_d9m.engine.control.session import deterministic

    try:
        with deterministic(**settings) as opened:
            yield opened
    except TooLateError as error:
        raise TooLateError(f"{error} {_EARLIER}") from None


@pytest.fixture(autouse=True)
def _d9m_session(request: pytest.FixtureRequest) -> "Iterator[Session | None]":
    settings = _read_markers(request.node)
    if settings is None and "deterministic_session" not in request.fixturenames:
        yield None
        return
    with _session(settings or {}) as opened:
        yield opened


@pytest.fixture
def deterministic_session(_d9m_session: "Session | None") -> "Iterator[Session]":
    """A deterministic session around the test; its settings are those of the marker."""
    # A test without a marker may request this fixture only while it runs.
    with nullcontext(_d9m_session) if _d9m_session is not None else _session({}) as opened:
        yield opened


@pytest.fixture
def golden_ledger(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Callable[..., AbstractContextManager[None]]:
    """Return a context whose fits are compared with the ledgers in the repository.

    ``with golden_ledger():`` runs its body in a deterministic session. The ledgers that fits with
    a ``DeterminismCallback`` leave in it are compared with those in ``golden/<module>/<test>``
    beside the test's file. ``pytest --d9m-update`` writes these. Call it with a name, which a
    second one in a test needs, and with settings such as ``seed=42``, which add to those of the
    marker ``deterministic``.
    """
    home = request.path.parent / "golden" / request.path.stem
    test = request.node.nodeid.partition("::")[2]
    marked = _read_markers(request.node) or {}
    used: set[Path] = set()  # by this test

    @contextmanager
    def compared(name: str | None = None, **settings: Any) -> Iterator[None]:
        from lightning_d9m.testing import as_first_run

        __tracebackhide__ = True  # a failure shows the line of the test
        folder = re.sub(r"[^\w.-]+", "-", name or test).strip("-.")
        if not folder:  # the folder of all golden ledgers of the module
            raise SettingError(
                f"The name of a golden ledger is {name!r}; allowed: a text with letters or digits."
            )
        golden = home / folder
        # Tests may share a ledger whose name they give; one test may run again.
        owner = test if name else request.config.stash[_GOLDEN].setdefault(golden, test)
        if golden in used or owner != test:
            raise SettingError(
                f"The golden ledger {golden} is already that of {owner}. Give each its name: "
                "golden_ledger('name')."
            )
        used.add(golden)
        written = tmp_path / "d9m" / golden.name
        with as_first_run(written, None, **{**marked, **settings}):
            yield
        _compare_with_golden(golden, written, request.config)

    return compared


def _compare_with_golden(golden: Path, written: Path, config: pytest.Config) -> None:
    from lightning_d9m.engine.ledger.folder import list_fits
    from lightning_d9m.testing import compare_fits

    __tracebackhide__ = True
    fits = list_fits(written) if written.exists() else []
    if not fits:
        raise SettingError(
            "No fit in golden_ledger() left a ledger, so there is nothing to compare. Train in it "
            "with callbacks=[DeterminismCallback()]."
        )
    if config.getoption("--d9m-update"):
        _replace_golden(golden, written)
        return
    if not golden.exists():
        raise NotBitExactError(
            f"There is no golden ledger {golden}. Write it with `pytest --d9m-update`, look at "
            "it, and commit it."
        )
    problem = compare_fits(list_fits(golden), fits)
    if problem is None:
        return
    if problem.may_be_stack and config.getini("d9m_on_stack_difference") == "skip":
        pytest.skip(f"The golden ledger comes from a different stack. {problem.text}")
    raise NotBitExactError(
        f"This run differs from its golden ledger {golden}. {problem.text}\n"
        "If the change is intended, write a new ledger with `pytest --d9m-update`."
    )


def _replace_golden(golden: Path, written: Path) -> None:
    """Replace the golden ledgers with a run's; the old ones stay until the copy is complete."""
    # Beside it, so that the last step is a rename: an interrupted update leaves the old ones.
    fresh = golden.with_name(f"{golden.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(written, fresh)
    shutil.rmtree(golden, ignore_errors=True)
    fresh.rename(golden)
