"""The length of epochs after a resume tells whether a loader applies its state twice."""

from types import SimpleNamespace

import pytest

from lightning_d9m.lightning.resume.exactness import EpochLength


def find_problems(batch, lengths):
    """Return the problem of each epoch after a resume, without None."""
    check = EpochLength(batch)
    found = []
    for epoch, length in enumerate(lengths):
        current = SimpleNamespace(ready=length)
        progress = SimpleNamespace(batch_progress=SimpleNamespace(current=current))
        loops = SimpleNamespace(epoch_loop=progress)
        problem = check.end_epoch(SimpleNamespace(fit_loop=loops, current_epoch=epoch))
        found += [] if problem is None else [problem]
    return found


@pytest.mark.parametrize(
    ("batch", "lengths", "epochs"),
    [
        (2, (6, 4, 6), [1]),
        (6, (6, 0), [1]),
        (0, (0, 6), [0]),
        (2, (6, 6, 4), []),
        (2, (6, 5, 3), []),
        (0, (6, 0), []),
    ],
)
def test_the_epoch_after_the_resumed_one_lacks_what_preceded_the_checkpoint(batch, lengths, epochs):
    found = find_problems(batch, lengths)
    assert [text.split(" ")[1] for text in found] == [str(epoch) for epoch in epochs]
