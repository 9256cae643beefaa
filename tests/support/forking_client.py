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


def main():
    """Ask for a fork, and end as it ends."""
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(sys.argv[1])
    folder = os.getcwd()  # noqa: PTH109 - pathlib takes long to import
    request = {"argv": sys.argv[2:], "variables": dict(os.environ), "folder": folder}
    files = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", (0, 1, 2)))]
    channel.sendmsg([b"f"], files)
    channel.sendall(json.dumps(request).encode() + b"\n")
    answers = channel.makefile()
    process = int(answers.readline())
    for number in _FORWARDED:
        signal.signal(number, lambda number, _: os.kill(process, number))
    status = os.waitstatus_to_exitcode(int(answers.readline()))
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


main()
