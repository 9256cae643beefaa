"""Fixtures for all tests, and a guard: a test that leaks what it set fails."""

import fcntl
import gc
import os
import random
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
import raise_sites
from forking_python import leave_out_work, share_python, shared_python
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from ledger_runs import runs  # noqa: F401 - a fixture

# Loaded before any test, both of Lightning's packages: the callback takes its bases from those that
# are loaded, and they set variables when they are first imported, as scikit-learn does, which is no
# leak.
FIRST = ("lightning.pytorch", "pytorch_lightning", "sklearn")

# A busy machine is slow, and that is no finding. Every run tries the same examples, so that a test
# passes or fails for the change that is tested; `--hypothesis-profile=search` tries new ones.
UNTIMED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("repeatable", derandomize=True, **UNTIMED)
settings.register_profile("search", print_blob=True, **UNTIMED)
settings.load_profile("repeatable")
# Else examples have constants of the modules that are loaded by then: other tests decide which.
providers.is_local_module_file = lambda _: False

collect_ignore = ["support"]  # helpers, and scripts that ranks run

SLOW = tuple(
    line
    for line in Path(__file__).with_name("slow_tests.txt").read_text().splitlines()
    if not line.startswith("#")
)


NO_CUDA_BUILD = pytest.mark.skip(reason="needs a CUDA build of torch")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the slow tests, and let the slowest files start first; skip what needs another torch."""
    import torch

    for item in items:
        if item.nodeid.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
        if torch.version.cuda is None and item.get_closest_marker("cuda_build"):
            item.add_marker(NO_CUDA_BUILD)
    files = [line.partition("::")[0] for line in SLOW]
    order = {file: place for place, file in enumerate(dict.fromkeys(files))}
    items.sort(key=lambda item: order.get(item.nodeid.partition("::")[0], len(order)))


def pytest_addoption(parser: pytest.Parser) -> None:
    about = raise_sites.__doc__.partition("\n")[0]
    parser.addoption("--raise-sites", type=Path, metavar="FILE", help=about)


def pytest_configure(config: pytest.Config) -> None:
    # With `-n`, the process that starts the workers runs no test.
    if not getattr(config.option, "numprocesses", None) or hasattr(config, "workerinput"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for module in FIRST:
                import_module(module)
            # torch 2.4 imports it, and with it SymPy, in each worker of a loader: seconds.
            import_module("torch.nested._internal.nested_tensor")
        leave_out_work()
    else:
        share_python()
    config.add_cleanup(gc.unfreeze)  # of imports_frozen: what is frozen at the end counts as leaked
    if file := config.option.raise_sites:
        config.add_cleanup(raise_sites.note_sites(file))
        os.environ["RAISE_SITES"] = str(file.absolute())  # for forking_python.py
        config.add_cleanup(lambda: os.environ.pop("RAISE_SITES"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Run a test that needs the cores for itself while no other worker runs a test."""
    if not hasattr(item.config, "workerinput"):
        return (yield)
    folder = Path(shared_python()).parent
    with (folder / "turn").open("w") as turn, (folder / "cores").open("w") as cores:
        fcntl.flock(turn, fcntl.LOCK_EX)  # no other test starts while one waits for the cores
        fcntl.flock(cores, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        fcntl.flock(turn, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            fcntl.flock(cores, fcntl.LOCK_UN)  # processes that the test forked have the file, too


# Lightning and torch write these for their own use; they are not ours to restore.
_FOREIGN_VARIABLES = (
    "PYTEST_CURRENT_TEST",
    "PL_GLOBAL_SEED",
    "PL_SEED_WORKERS",
    "TORCHINDUCTOR_CACHE_DIR",
)


def _settings() -> dict[str, object]:
    import torch

    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "cudnn.deterministic": torch.backends.cudnn.deterministic,
        "threads": torch.get_num_threads(),
        "variables": {k: v for k, v in os.environ.items() if k not in _FOREIGN_VARIABLES},
    }


@pytest.fixture(scope="module", autouse=True)
def imports_frozen() -> None:
    """Spare the collector what is imported: to look through it takes it a quarter of a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Fail the test that leaves a flag, a thread count or a variable other than it found it."""
    before = _settings()
    yield
    after = _settings()
    variables = dict(before.pop("variables").items() ^ after.pop("variables").items())
    assert not variables, "the test leaked variables"
    assert after == before, "the test leaked a setting"


@pytest.fixture(autouse=True)
def fixed_rng() -> None:
    """Start every test from one RNG state, so that no test depends on the order of the others."""
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    # torch.manual_seed notes the stack for devices that have not started: 2 ms, in each test.
    seed = torch.manual_seed if torch.cuda.is_initialized() else torch.default_generator.manual_seed
    seed(0)


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """Return torch's function that sets the number of threads, which is put back at the end."""
    import torch

    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let torch's CPU kernels add in order: several threads share work differently."""
    from lightning_d9m.engine.control.environment import threads_pinned

    with threads_pinned(1):
        yield


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Let threads race, also where the tests run with one."""
    from lightning_d9m.engine.control.environment import threads_pinned

    with threads_pinned(2):
        yield


@pytest.fixture
def unseeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave no trace of an earlier ``seed_everything``."""
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    monkeypatch.delenv("PL_SEED_WORKERS", raising=False)


@pytest.fixture
def new_process(monkeypatch):
    """Let each fit count as the first of its process, as it would in a run of its own."""
    from lightning_d9m.engine.control import session

    start = lambda: monkeypatch.setattr(session, "_of_process", session.FitCount())  # noqa: E731
    start()
    return start


@pytest.fixture
def d9m(capsys):
    """Return a function that runs a command in this process: its status, output and errors."""
    from lightning_d9m.tools.cli.main import main

    def run(*words):
        try:
            status = main([str(word) for word in words])
        except SystemExit as ended:  # argparse
            status = ended.code
        return status, *capsys.readouterr()

    return run


@pytest.fixture(scope="session")
def forking_python() -> str:
    """Return a Python that has imported torch and Lightning; see forking_python.py."""
    return shared_python()
