"""The status line on a terminal and elsewhere."""

import os
import pty
import subprocess
import sys

CODE = """
from pathlib import Path
from lightning_d9m.launch.progress import RunProgress

with RunProgress("run 1 of 2", Path(".")) as progress:
    progress.tick(1.0)
    progress.tick(2.0)
"""


def test_on_a_terminal_one_line_is_rewritten_and_the_last_stays(tmp_path):
    leader, follower = pty.openpty()

    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
    subprocess.run(
        [sys.executable, "-c", CODE], stderr=follower, cwd=tmp_path, env=environment, check=True
    )
    os.close(follower)
    text = os.read(leader, 65536).decode()
    os.close(leader)
    assert "run 1 of 2: started" in text
    assert "run 1 of 2: 1 s, 0 epochs" in text
    assert "\x1b[2K" in text
    *_, last = text.split("\x1b[2K")
    assert last == "run 1 of 2: done, 0 epochs\r\n"


def test_elsewhere_nothing_is_rewritten(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", CODE], stderr=subprocess.PIPE, cwd=tmp_path, text=True, check=True
    )
    assert ended.stderr == "run 1 of 2: started\nrun 1 of 2: done, 0 epochs\n"
