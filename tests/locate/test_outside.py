"""What two runs read from outside before they differed, and the order of their samples."""

import json

import pytest

from lightning_d9m.engine.ledger.differences import Divergence, PlaceDifference
from lightning_d9m.tools.locate.outside import describe_samples, find_reads

BEGIN = {"time": 1, "ledger": ["fit-000", 0, "train.py", 9]}
FIRST = {"time": 20, "mark": ["batch", 0, 3, 3]}


def read(time, kind, value, line, *, through="", what="w"):
    return {"time": time, "read": [kind, what, value, "train.py", line, through]}


def write(tmp_path, *runs):
    folders = [tmp_path / str(number) for number in range(len(runs))]
    for folder, lines in zip(folders, runs, strict=True):
        folder.mkdir()
        text = "\n".join(json.dumps(line) for line in lines)
        (folder / "outside-1.jsonl").write_text(f'{text}\n{{"time": 3, "re')  # killed
    return folders


def divergence(kind="batch"):
    place = PlaceDifference(0, kind, "batch:0", 0, "", "")
    return Divergence(epoch=0, step=3, batch=3, moment="batch", places=[place], count=1, compared=9)


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        ("weight", [2, 8, 3, 1, 10]),  # state was read when the batch began
        ("batch", [7, 2, 8, 3, 1, 10]),
    ],
)
def test_reads_before_the_divergence_the_nearest_first(tmp_path, kind, lines):
    def run(value):
        return [
            BEGIN,
            read(2, "clock", value, 1),  # last: most programs only measure times
            read(3, "entropy", value, 8),
            read(5, "listing", value, 2),
            read(6, "entropy", value, 3, through="numpy") | {"time": 2},
            read(7, "file", "same", 4),
            read(8, "file", value, 10, through="darts, lightning"),  # settings, for itself
            read(8, "seed", "3", 5),
            read(9, "entropy", value, 9, through="library"),  # within the call that trains
            FIRST,
            read(21, "entropy", value, 7),
            {"time": 30, "mark": ["batch", 0, 4, 4]},
            read(31, "entropy", value, 6),
        ]

    folders = write(tmp_path, run("a"), run("b"))
    found = [one.line for one in find_reads(folders, "fit-000", divergence(kind))]
    assert found == [*lines, 9]


def test_a_file_that_cannot_be_compared_is_not_called_different(tmp_path):
    run = [BEGIN, read(2, "file", None, 1, what="/dev/x"), read(3, "file", "same", 2), FIRST]
    found = find_reads(write(tmp_path, run, run), "fit-000", divergence())
    assert [str(own) for own in found] == [
        "a file is read whose content cannot be compared (/dev/x)"
    ]


def test_the_same_samples_in_another_order(tmp_path):
    def run(*batches):
        return [BEGIN, FIRST, *({"time": 21, "samples": list(batch)} for batch in batches)]

    ordered, mixed = run("ab", "cd"), run("cb", "ad")
    folders = write(tmp_path, ordered, mixed, run("cd", "ab"), run("ab", "ce"))
    said = [describe_samples([folders[0], one], "fit-000", divergence()) for one in folders]
    assert said[0] == said[3] == ""
    assert said[1].startswith("the same 4 samples in another order, in epoch 0")
    assert said[2].startswith("the same 2 batches in another order")
