"""A fork stands for an interpreter: its arguments, variables, randomness, status and signals."""

import os
import signal
import subprocess
import sys

import pytest


def start(python, *words, **variables):
    return subprocess.Popen(
        [python, *words],
        env=os.environ | {"PYTHONHASHSEED": "0"} | variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(python, *words, **variables):
    process = start(python, *words, **variables)
    out, err = process.communicate("given")
    return process.returncode, out, err


@pytest.mark.parametrize("which", ["fork", "interpreter"])
def test_what_a_program_finds_and_leaves(which, forking_python, tmp_path):
    """Both answer alike, whatever the fork's server had."""
    python = forking_python if which == "fork" else sys.executable
    (tmp_path / "beside.py").write_text("NAME = __name__")
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, beside, atexit, threading\n"
        "print(__name__, beside.NAME, sys.argv, sys.stdin.read(), os.environ['WORD'])\n"
        "print(os.environ['PYTEST_CURRENT_TEST'])\n"
        "atexit.register(print, 'at exit')\n"
        "threading.Thread(target=lambda: print('thread')).start()\n"
        "print(sys.modules['__main__'].__file__, file=sys.stderr)\n"
        "sys.exit(7)\n"
    )
    status, out, err = run(python, str(script), "a", "b", WORD="word", PYTEST_CURRENT_TEST="test")
    first, second, *ends = out.splitlines()
    assert first == f"__main__ beside {[str(script), 'a', 'b']} given word"
    assert second == "test"
    assert ends == ["thread", "at exit"]
    assert err == f"{script}\n"
    assert status == 7


def test_a_fixed_hash_seed_is_that_of_an_interpreter(forking_python):
    code = "print(hash('text'))"
    assert run(forking_python, "-c", code) == run(sys.executable, "-c", code)
    assert run(forking_python, "-c", code, PYTHONHASHSEED="3") == run(
        sys.executable, "-c", code, PYTHONHASHSEED="3"
    )
    assert run(forking_python, "-c", code, PYTHONHASHSEED="") == run(forking_python, "-c", code)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT])
def test_a_signal_that_ends_the_fork_is_the_status(number, forking_python):
    assert run(forking_python, "-c", f"import os; os.kill(os.getpid(), {number})")[0] == -number


def test_signals_reach_the_fork_and_it_is_killed_with_its_client(forking_python):
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "print('ready', flush=True)\n"
        "signal.pause()\n"
    )
    with start(forking_python, "-c", code) as process:
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait() == 5
    with start(forking_python, "-c", code) as process:
        assert process.stdout.readline() == "ready\n"
        process.kill()
        assert process.stdout.read() == ""  # ends when the fork has closed it
