"""The pytest plugin, in test suites of its own."""

import random

import pytest
import torch

import lightning_d9m.integrations.lightning.callback
import lightning_d9m.ops.portability.mode  # noqa: F401 - what an inner pytest imports, it forgets
from lightning_d9m import deterministic
from lightning_d9m.engine.control import environment

TRAINING = """
import lightning.pytorch as lightning
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_d9m import DeterminismCallback

def train(scale=1.0):
    model = BoringModel()
    model.layer.weight.data *= scale
    callback = DeterminismCallback()
    trainer = lightning.Trainer(
        max_epochs=1, limit_train_batches=2, limit_val_batches=0, callbacks=[callback],
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accelerator="cpu",
    )
    trainer.fit(model)
    return callback.digest
"""


@pytest.fixture
def suite(pytester, monkeypatch):
    """Return a function that writes a test module and runs it in this process."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)  # of `seed_everything` in earlier tests
    pytester.makepyfile(training=TRAINING)

    def run(*words, configuration="", **modules):
        pytester.makeini(f"[pytest]\npythonpath = .\n{configuration}")
        pytester.makepyfile(**modules)
        return pytester.runpytest_inprocess("-p", "no:randomly", "-p", "no:xdist", *words)

    return run


def test_markers_and_a_fixture_open_a_session(suite):
    """The settings of all markers count, the closest first."""
    suite(
        test_it="""
        import random, pytest, torch
        from lightning_d9m.engine.control.session import active_session

        drawn = []

        @pytest.fixture
        def weights():
            return torch.rand(2)

        @pytest.mark.parametrize("time", [1, 2])
        @pytest.mark.deterministic(seed=7)
        def test_marked(time, weights):
            random.seed()  # what is drawn after this is not the session's
            drawn.append((weights.tolist(), torch.rand(2).tolist()))
            assert active_session().settings.seed == 7
            assert drawn[0] == drawn[-1]

        def test_fixture(deterministic_session):
            assert deterministic_session is active_session()
            assert torch.are_deterministic_algorithms_enabled()

        def test_late(request):
            assert active_session() is None
            session = request.getfixturevalue("deterministic_session")
            assert session is active_session() is not None

        def test_neither():
            assert active_session() is None

        @pytest.mark.deterministic(seed=7, threads=1)
        class TestIt:
            @pytest.mark.deterministic(seed=9)
            def test_both(self):
                settings = active_session().settings
                assert (settings.seed, settings.threads) == (9, 1)

            @pytest.mark.deterministic
            def test_class(self):
                assert active_session().settings.seed == 7
        """
    ).assert_outcomes(passed=7)


def test_the_draws_of_a_fit_do_not_depend_on_the_tests_before(suite):
    result = suite(
        test_it="""
        import pytest, torch, training
        from lightning_d9m import deterministic

        seen = []

        @pytest.fixture(scope="module")
        def session():
            with deterministic():
                yield

        def check():
            torch.manual_seed(1)
            seen.append([training.train(), training.train()])
            assert seen[-1] == seen[0]
            assert seen[-1][0] != seen[-1][1]  # a second fit draws other numbers

        @pytest.mark.parametrize("time", [1, 2])
        def test_process(time):
            check()

        @pytest.mark.parametrize("time", [1, 2])
        def test_session(time, session):
            check()
        """
    )
    result.assert_outcomes(passed=4)


NOT_ALLOWED = [
    ("@pytest.mark.deterministic(seed=-1)", "", "errors", "*seed is -1; allowed:*"),
    ("@pytest.mark.deterministic(7)", "", "errors", "*settings by name*"),
    ("", "with golden_ledger(): pass", "failed", "*nothing to compare*"),
    # Its folder would be that of all golden ledgers of the module.
    (
        "",
        "with golden_ledger('+'): pass",
        "failed",
        "*The name of a golden ledger is '+'; allowed*",
    ),
]


@pytest.mark.parametrize(("marker", "body", "outcome", "line"), NOT_ALLOWED)
def test_what_is_not_allowed_fails_the_test(suite, marker, body, outcome, line):
    test = f"import pytest\n{marker}\ndef test_it(golden_ledger):\n    {body or 'pass'}"
    result = suite(test_it=test)
    result.assert_outcomes(**{outcome: 1})
    result.stdout.fnmatch_lines([line])


GOLDEN = """
from training import train

class TestTraining:
    def test_it(self, golden_ledger):
        with golden_ledger(seed=3):
            train()
"""


def test_a_golden_ledger_is_written_compared_and_written_again(suite, pytester):
    result = suite(test_it=GOLDEN)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*There is no golden ledger*--d9m-update*"])
    golden = pytester.path / "golden/test_it/TestTraining-test_it/fit-000/rank-0.jsonl"
    changed = GOLDEN.replace("train()", "train(1.5)")
    for test, other in ((GOLDEN, changed), (changed, GOLDEN)):
        suite("--d9m-update", test_it=test).assert_outcomes(passed=1)
        before = golden.read_bytes()
        suite(test_it=test).assert_outcomes(passed=1)
        result = suite(test_it=other)
        result.assert_outcomes(failed=1)
        lines = ["*differs from its golden ledger*", "*diverges first*", "*layer.weight*"]
        result.stdout.fnmatch_lines([*lines, "*--d9m-update*"])
        assert golden.read_bytes() == before


def test_a_golden_ledger_of_another_stack_fails_or_skips(suite, monkeypatch):
    suite("--d9m-update", test_it=GOLDEN).assert_outcomes(passed=1)
    monkeypatch.setenv("NPY_DISABLE_CPU_FEATURES", "AVX512F")  # NumPy has read it long ago
    changed = GOLDEN.replace("train()", "train(1.5)")
    result = suite(test_it=changed)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*The stacks differ*"])
    skip = "d9m_on_stack_difference = skip"
    suite(test_it=changed, configuration=skip).assert_outcomes(skipped=1)
    # Where the bits agree all the same, there is nothing to excuse.
    suite(test_it=GOLDEN, configuration=skip).assert_outcomes(passed=1)


def test_a_portable_golden_ledger_of_another_stack_holds_and_excuses_nothing(suite, monkeypatch):
    golden = GOLDEN.replace("golden_ledger(", "golden_ledger(portable=True, ")
    suite("--d9m-update", test_it=golden).assert_outcomes(passed=1)
    monkeypatch.setenv("NPY_DISABLE_CPU_FEATURES", "AVX512F")  # NumPy has read it long ago
    suite(test_it=golden).assert_outcomes(passed=1)
    skip = "d9m_on_stack_difference = skip"
    result = suite(test_it=golden.replace("train()", "train(1.5)"), configuration=skip)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*The stacks differ; portable bits do not depend on them*"])


def test_variables_are_set_before_conftest_files_load(suite, pytester):
    pytester.makeconftest("import os; WORKSPACE = os.environ.get('CUBLAS_WORKSPACE_CONFIG')")
    test = "from conftest import WORKSPACE\ndef test_it(): assert WORKSPACE == {!r}"
    suite(test_it=test.format(None)).assert_outcomes(passed=1)
    result = suite(test_other=test.format(":4096:8"), configuration="d9m = true")
    assert "test_other.py ." in result.stdout.str()
    result.stdout.fnmatch_lines(["d9m: *"])


def test_too_late_is_said_with_what_to_do(suite, monkeypatch):
    monkeypatch.setattr(environment.torch.cuda, "is_initialized", lambda: True)
    result = suite(test_it="def test_it(deterministic_session): pass")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*set `d9m = true` in the configuration*"])
    result = suite(test_it="def test_it(): pass", configuration="d9m = true")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*d9m: *CUBLAS_WORKSPACE_CONFIG*"])


def test_an_unknown_policy_is_a_usage_error(suite):
    result = suite(test_it="", configuration="d9m_on_stack_difference = ignore")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*'ignore'; allowed: fail or skip*"])


PLUGINS = """
import random, pytest, torch

@pytest.mark.parametrize("number", range(6))
@pytest.mark.deterministic(seed=5)
def test_draws(number):
    assert random.random() == {python!r}
    assert torch.rand(1).item() == {torch!r}
"""


def test_it_gets_on_with_xdist_and_randomly(pytester, forking_python):
    """Randomly reseeds Python's and NumPy's generators before each test; the session is later."""
    with deterministic(seed=5):
        words = {"python": random.random(), "torch": torch.rand(1).item()}
    pytester.makepyfile(PLUGINS.format(**words))
    result = pytester.run(forking_python, "-m", "pytest", "--randomly-seed=1", "-n", "1")
    result.assert_outcomes(passed=6)
    result.stdout.fnmatch_lines(["plugins:*randomly*xdist*"])


def test_a_suite_that_does_not_use_it_loads_no_torch(pytester):
    pytester.makepyfile("import sys\ndef test_it(): assert 'torch' not in sys.modules")
    # Plugins that only take time: each pytest imports them in a second.
    others = [f"-pno:{name}" for name in ("anyio", "hydra_pytest", "hypothesispytest", "randomly")]
    pytester.runpytest_subprocess(*others).assert_outcomes(passed=1)


def test_each_golden_ledger_has_its_name_and_the_settings_of_the_marker(suite, pytester):
    result = suite(
        "--d9m-update",
        test_it="""
        import pytest
        from lightning_d9m.engine.control.session import active_session
        from training import train

        @pytest.mark.parametrize("name", ["a+b", "a*b"])
        def test_ids(golden_ledger, name):
            with golden_ledger():
                train()

        def test_twice(golden_ledger):
            with golden_ledger("one"):
                train()
            with golden_ledger("one"):
                train()

        @pytest.mark.deterministic(seed=42)
        def test_marked(golden_ledger):
            with golden_ledger(threads=1):
                assert active_session().settings.seed == 42
                train()
        """,
    )
    result.assert_outcomes(passed=2, failed=2)
    lines = ["*test_ids-a-b is already that of test_ids?a+b?. Give*", "*one is already that of*"]
    result.stdout.fnmatch_lines(lines)
