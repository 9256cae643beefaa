"""The progress of ``d9m repeat`` counts epochs as they are recorded."""

import os
import pty
import sys
from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from lightning_d9m.tools.launch.progress import RunProgress

EPOCH = b'{"kind":"digests","moment":"epoch","epoch":3}\n'
OTHER = b'{"kind":"digests","moment":"final"}\n'


@given(st.lists(st.sampled_from([EPOCH, OTHER, OTHER * 40])), st.lists(st.integers(1, 200)))
def test_whole_lines_are_counted_in_pieces_of_any_size(tmp_path_factory, lines, cuts):
    folder = tmp_path_factory.mktemp("run")
    path = folder / "fit-000" / "rank-0.jsonl"
    path.parent.mkdir()
    text, progress = b"".join(lines), RunProgress("run", folder)
    with path.open("wb", buffering=0) as ledger:
        for cut in [*cuts, len(text)]:
            piece, text = text[:cut], text[cut:]
            ledger.write(piece)
            assert progress.count_epochs() == path.read_bytes().count(
                b'"moment":"epoch","epoch":3}\n'
            )


def test_several_fits_are_added_up_and_one_epoch_is_no_epochs(tmp_path, capsys):
    for number in range(2):
        path = tmp_path / f"fit-{number:03d}" / "rank-0.jsonl"
        path.parent.mkdir()
        path.write_bytes(EPOCH)
    with RunProgress("run 1 of 2", tmp_path) as progress:
        progress.tick(1.0)
    assert capsys.readouterr().err == "run 1 of 2: started\nrun 1 of 2: done, 2 epochs\n"


def test_on_a_terminal_one_line_is_rewritten_and_the_last_stays(tmp_path, monkeypatch):
    leader, follower = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    with os.fdopen(follower, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with RunProgress("run 1 of 2", tmp_path) as progress:
            progress.tick(1.0)
            progress.tick(2.0)
    data = b""
    with suppress(OSError):  # how Linux says that the other end is closed; a read may be partial
        while part := os.read(leader, 65536):
            data += part
    os.close(leader)
    text = data.decode()
    assert "run 1 of 2: started" in text
    assert "run 1 of 2: 1 s\r" in text
    *_, last = text.split("\x1b[2K")
    assert last == "run 1 of 2: done\r\n" != text
