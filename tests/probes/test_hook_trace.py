"""What ran when the state of two runs began to differ."""

from contextlib import nullcontext

import pytest

from lightning_d9m.probes.dumps import find_writer, trace_hooks

BETWEEN = "in no hook: by the training loop or a thread"


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("aaaa", "aaaa", ""),
        ("abbb", "accc", "while Net.on_fit_start ran"),
        ("aaab", "aaac", "while EMA.on_fit_end ran"),
        ("aabb", "aacc", f"between Net.on_fit_start and EMA.on_fit_end, {BETWEEN}"),
    ],
)
def test_the_first_line_that_differs_tells_who_wrote(tmp_path, one, other, expected):
    for name, digests in (("one", one), ("other", other)):
        left = iter(digests)
        profile = trace_hooks(tmp_path / name / "rank-0", lambda left=left: next(left), nullcontext)
        for hook in ("[Module]Net.on_fit_start", "[Callback]EMA.on_fit_end"):
            with profile(hook):
                pass
    assert find_writer([tmp_path / "one", tmp_path / "other"], 0) == expected
    assert find_writer([tmp_path / "one", tmp_path / "absent"], 0) == ""


def test_within_a_hook_that_calls_another(tmp_path):
    for name in ("one", "other"):
        left = iter(["same", name])
        folder = tmp_path / name / "rank-0"
        profile = trace_hooks(folder, lambda left=left: next(left, None), nullcontext)
        with profile("run_training_epoch"), profile("[Callback]EMA.on_train_start"):
            pass
    folders = [tmp_path / "one", tmp_path / "other"]
    assert find_writer(folders, 0) == "while run_training_epoch ran, before EMA.on_train_start"
