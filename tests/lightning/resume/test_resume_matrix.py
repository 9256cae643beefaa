"""Kinds of programs resume exactly, or are refused, whatever the processes and workers.

``python tests/support/resume_matrix.py FOLDER`` tries all of them in all ways.
"""

import pytest
from resume_matrix import judge


@pytest.mark.parametrize(
    ("kind", "processes", "workers", "word"),
    [
        ("GradScaler", 1, 0, "equal"),
        ("StatefulDataLoader", 1, 2, "equal"),
        ("Lookahead", 1, 0, "refused"),
        ("set_epoch() of a dataset", 3, 0, "equal"),
        ("FSDP2 that accumulates", 2, 0, "equal"),
    ],
)
def test_a_kind_resumes_within_an_epoch_and_at_its_end(tmp_path, kind, processes, workers, word):
    assert judge(kind, tmp_path / "runs", processes, workers, 1) == [word, word]
