"""What ran when the state of two runs began to differ."""

from contextlib import nullcontext

import pytest

from lightning_d9m.probes.hook_trace import HookTrace, find_writer


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (["same"] * 4, ["same"] * 4, ""),
        (["one"] * 4, ["other"] * 4, ""),
        (
            ["same", "one", "one", "one"],
            ["same", "other", "other", "other"],
            "while Net.on_fit_start ran",
        ),
        (["same"] * 3 + ["one"], ["same"] * 3 + ["other"], "while EMA.on_fit_end ran"),
        (
            ["same", "same", "one", "one"],
            ["same", "same", "other", "other"],
            (
                "between Net.on_fit_start and EMA.on_fit_end, in no hook: by the training loop or "
                "a thread"
            ),
        ),
    ],
)
def test_the_first_line_that_differs_tells_who_wrote(tmp_path, one, other, expected):
    for name, digests in (("one", one), ("other", other)):
        left = iter(digests)
        trace = HookTrace(tmp_path / name / "rank-0", lambda left=left: next(left))
        profile = trace.around(nullcontext)
        for hook in ("[Module]Net.on_fit_start", "[Callback]EMA.on_fit_end"):
            with profile(hook):
                pass
    assert find_writer([tmp_path / "one", tmp_path / "other"], 0) == expected
    assert find_writer([tmp_path / "one", tmp_path / "absent"], 0) == ""


def test_within_a_hook_that_calls_another(tmp_path):
    for name in ("one", "other"):
        left = iter(["same", name])
        trace = HookTrace(tmp_path / name / "rank-0", lambda left=left: next(left, None))
        profile = trace.around(nullcontext)
        with profile("run_training_epoch"), profile("[Callback]EMA.on_train_start"):
            pass
    folders = [tmp_path / "one", tmp_path / "other"]
    assert find_writer(folders, 0) == "while run_training_epoch ran, before EMA.on_train_start"


def test_runs_whose_hooks_differ_show_nothing(tmp_path):
    for name in ("one", "other"):
        trace = HookTrace(tmp_path / name / "rank-0", lambda: "same")
        with trace.around(nullcontext)(name):
            pass
    assert find_writer([tmp_path / "one", tmp_path / "other"], 0) == ""
