"""A process with a Gloo group ends with its own exit status, not with an abort at its end."""

import subprocess

import pytest

# Runs what the interpreter runs at its end, and says whether a group is left then.
PROGRAM = """
import atexit
import sys
import torch.distributed as dist
from lightning_d9m.ranks.groups import close_group_at_exit

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
if sys.argv[1] == "asked":
    close_group_at_exit()
    close_group_at_exit()
atexit._run_exitfuncs()
print(dist.is_initialized())
if dist.is_initialized():
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(("asked", "left"), [("asked", "False"), ("not asked", "True")])
def test_the_group_is_closed_before_the_interpreter_ends(forking_python, asked, left):
    ended = subprocess.run(
        [forking_python, "-c", PROGRAM, asked],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (ended.returncode, ended.stdout.strip()) == (0, left), ended.stderr
