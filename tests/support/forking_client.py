"""The process that stands for a fork of ``forking_python.py``: its pipes, its signals, its end.

Usage: python -I -S forking_client.py SOCKET ARGUMENTS...
"""

import array
import json
import os
import signal
import socket
import sys

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def _is_inherited(number):
    """Return whether a file is open that this program has not opened itself."""
    try:
        return os.get_inheritable(number)
    except OSError:  # the list of them
        return False


def main():
    """Ask for a fork, and end as it ends."""
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(sys.argv[1])
    # The program may be running before this process knows its number: signals wait until then.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    folder = os.getcwd()  # noqa: PTH109 - pathlib takes long to import
    request = {"argv": sys.argv[2:], "variables": dict(os.environ), "folder": folder}
    # The standard streams, and what the process has inherited besides: pipes of multiprocessing.
    numbers = [n for n in map(int, os.listdir("/proc/self/fd")) if _is_inherited(n)]  # noqa: PTH208 - as above
    request["files"] = numbers
    files = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", numbers))]
    channel.sendmsg([b"f"], files)
    channel.sendall(json.dumps(request).encode() + b"\n")
    answers = channel.makefile()
    process = int(answers.readline())
    for number in _FORWARDED:
        signal.signal(number, lambda number, _: os.kill(process, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    status = os.waitstatus_to_exitcode(int(answers.readline()))
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


main()
