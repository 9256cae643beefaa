"""A Python that starts in 50 ms with torch and Lightning imported, for tests that start trainings.

An interpreter that imports torch and Lightning takes 3 to 5 s of CPU time before it does
anything. A server imports them once, for all workers of xdist; each program then runs in a fork of
it. ``ForkingPython`` writes a program ``python`` that any command can start: ``d9m repeat --
python train.py``, ranks of torch's DDP, ``horovodrun``. It understands ``python SCRIPT``, ``-c
CODE`` and ``-m MODULE``, also after ``-W ACTION``, ``-B``, ``-u`` and ``-XNAME``, which torchrun,
multiprocessing and Jupyter give.

A fork has the arguments, variables, folder, pipes, signals, network and mounts of the process that
stands for it (``forking_client.py``), and is killed if that process is. It differs from a new
interpreter in these points; a test of one of them starts ``sys.executable``:

- The modules are imported before the program begins; nothing runs at its ``import torch``.
  ``LIGHTNING_D9M=1`` takes effect when the fork begins.
- Lightning has found the entry points of callbacks, the versions of packages and what Lightning's
  classes set are known, and no file waits for the disk.
- Finalizers of what is imported do not run at the end; torchrun's log does not name its methods.
- Without ``PYTHONHASHSEED`` the seed is 0. With ``random`` it is the server's, which all its forks
  share.
- The fork is a child of the server, not of the process that stands for it.
"""

import array
import atexit
import ctypes
import fcntl
import gc
import importlib.util
import json
import multiprocessing
import os
import runpy
import select
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from contextlib import suppress
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

# The folder tests/horovod, which pytest's path has, is a namespace of that name: without a file.
_HOROVOD = importlib.util.find_spec("horovod")
# What the trainings of the tests import.
TRAINING = (
    "lightning.pytorch",
    "lightning_d9m.integrations.lightning.callback",
    "sklearn.datasets",
    "torch.distributed.checkpoint",
    *(["horovod.torch"] if _HOROVOD and _HOROVOD.origin else []),
)
_SHARED = "D9M_FORKING_PYTHON"  # the path that workers take from the process that starts them
_MOST_FILES = 200  # that a process inherits
_FREE = 500  # they have lower numbers
_CLIENT = Path(__file__).with_name("forking_client.py")


class ForkingPython:
    """Two servers, with and without a fixed hash seed.

    Args:
        modules: The modules that the programs find imported.

    Attributes:
        path: The program ``python``.
    """

    def __init__(self, modules=TRAINING):
        self._folder = Path(tempfile.mkdtemp(prefix="d9m-python-"))
        self.path = str(self._folder / "python")
        self._servers = [self._start(seed, modules) for seed in ("0", "random")]
        client = shlex.join([sys.executable, "-I", "-S", str(_CLIENT)])
        Path(self.path).write_text(f"""#!/bin/sh
case "$PYTHONHASHSEED" in
""|0) exec {client} {self._folder}/0 "$@";;
random) exec {client} {self._folder}/random "$@";;
*) exec {shlex.quote(sys.executable)} "$@";;
esac
""")
        Path(self.path).chmod(0o755)

    def _start(self, seed, modules):
        foreign = ("LIGHTNING_D9M", "PL_", "PYTEST_", "PYTHONHASHSEED")
        variables = {n: v for n, v in os.environ.items() if not n.startswith(foreign)}
        # Threads that wait leave the cores to other tests. torch reads this when it is imported.
        variables |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        variables |= {"PYTHONHASHSEED": "0"} if seed == "0" else {}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self._folder / seed))
            listener.listen(64)
            words = [sys.executable, __file__, str(listener.fileno()), self.path, *modules]
            return subprocess.Popen(
                words, env=variables, pass_fds=[listener.fileno()], stdin=subprocess.PIPE
            )

    def end(self):
        """End the servers; their forks have ended."""
        for server in self._servers:
            server.communicate()  # closes its standard input, which ends it
        shutil.rmtree(self._folder)


@cache
def shared_python(*modules):
    """Return the program ``python`` that all tests share, or those of this process by modules."""
    if not modules and _SHARED in os.environ:
        return os.environ[_SHARED]
    python = ForkingPython(modules or TRAINING)
    atexit.register(python.end)
    return python.path


def share_python():
    """Start the program for the workers that this process starts."""
    os.environ[_SHARED] = shared_python()


_find_entry_points = cache(entry_points)
_GROUPS = {
    "lightning.fabric": ("lightning.fabric", "lightning.pytorch"),
    "lightning_fabric": ("lightning_fabric", "pytorch_lightning"),
}


def leave_out_work():
    """Wait for no disk, and look for entry points of both packages of Lightning once.

    No test can see it; processes of ``sys.executable`` do all of it, as users' do. The disk takes 8
    ms for each ledger. Lightning looks through all installed packages for each Trainer, which takes
    7 ms, a third of a small training.
    """
    os.fsync = lambda file: None
    for package, groups in _GROUPS.items():
        registry = sys.modules.get(f"{package}.utilities.registry")
        if registry is not None:
            registry.entry_points = _find_entry_points
            for group in groups:
                _find_entry_points(group=f"{group}.callbacks_factory")


def _serve(listener, modules):
    """Fork for each client; return the connection in the fork."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system forgets guards that have ended
    while 0 not in select.select([0, listener], [], [])[0]:
        for module in modules:  # not before there is a client
            __import__(module)
        leave_out_work()
        _prepare_forks()
        gc.freeze()  # so that no fork copies what it does not change
        client, _ = listener.accept()
        if not os.fork():
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return client
        client.close()
    os._exit(0)


def _prepare_forks():
    """Find what each training would find, and leave out what none can see."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    from lightning_d9m.engine.ledger.stack import _capture_packages
    from lightning_d9m.integrations.trainer.trainer_attributes import list_stored

    for finalizer in list(weakref.finalize._registry):
        finalizer.atexit = False  # torch's change 10,000 pages at the end of each fork: 50 ms
    # For each line of its log torchrun would look for the file of `runpy` in all modules: 0.1 s.
    dynamic_rendezvous.get_method_name = lambda: "unknown"
    _capture_packages()
    for package in ("lightning.pytorch", "pytorch_lightning"):
        if (module := sys.modules.get(package)) is not None:
            for kind in (module.LightningModule, module.Callback):
                list_stored(kind)


def _enter_namespaces(client):
    """Enter the network, the host name and the mounts of the client, if they are its own."""
    process = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("net", "uts", "mnt"):
        place = Path(f"/proc/{process}/ns/{kind}")
        if place.readlink() != Path(f"/proc/self/ns/{kind}").readlink():
            with place.open() as file:
                if libc.setns(file.fileno(), 0):
                    raise OSError(ctypes.get_errno(), f"cannot enter {place}")


def _guard(client):
    """Fork the program and tell the client of its end; return in the fork."""
    process = os.fork()
    if not process:
        os.setsid()
        return
    end = os.pidfd_open(process)
    with suppress(OSError):
        client.sendall(f"{process}\n".encode())
        if end in select.select([end, client], [], [])[0]:
            client.sendall(f"{os.waitpid(process, 0)[1]}\n".encode())
            os._exit(0)
    with suppress(ProcessLookupError):  # the client was killed
        os.killpg(process, signal.SIGKILL)
    os._exit(0)


def _receive(client):
    """Take the client's open files and folder; return its variables and arguments."""
    room = socket.CMSG_SPACE(_MOST_FILES * array.array("i").itemsize)
    _, [(_, _, data)], _, _ = client.recvmsg(1, room)
    request = json.loads(client.makefile().readline())
    files = array.array("i")
    files.frombytes(data)
    # First out of the way of the numbers that they have in the client.
    kept = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _FREE) for file in files]
    for file in files:
        os.close(file)
    for number, file in zip(request["files"], kept, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["folder"])
    return request["variables"], request["argv"]


def _become(variables, arguments, path):
    """Change what the interpreter took from its variables and arguments when it started."""
    import numpy as np
    import torch

    from lightning_d9m.integrations.autoload import entry_points

    os.environ.clear()
    os.environ.update(variables)
    sys.executable = path
    if "horovod.runner.launch" not in arguments:  # its processes begin a session; a fork has one
        multiprocessing.set_executable(path)
    sys.orig_argv = [path, *arguments]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=bool(variables.get("PYTHONUNBUFFERED")))
    np.random.seed()
    torch.default_generator.seed()
    torch.set_num_threads(int(variables.get("OMP_NUM_THREADS") or os.cpu_count()))
    sys.path[1:1] = [p for p in variables.get("PYTHONPATH", "").split(os.pathsep) if p]
    if file := variables.get("RAISE_SITES"):
        sys.path.append(str(Path(__file__).parents[1]))
        importlib.import_module("raise_sites").note_sites(file)
        sys.path.pop()
    entry_points.load()  # torch calls it at its import


def _run(arguments):
    """Run the program as the interpreter would; return its exit status."""
    try:
        _execute(arguments)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException as error:  # noqa: BLE001 - as the interpreter does
        sys.last_value = error
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _end(status):
    """End as the interpreter does, but without freeing each object, which takes a second."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _execute(arguments):
    while arguments[0] in ("-B", "-W", "-u") or arguments[0].startswith("-X"):
        option, *arguments = arguments
        if option == "-W":
            warnings._setoption(arguments.pop(0))
    kind, *rest = arguments
    if kind in ("-c", "-m"):
        sys.path[0] = ""
        sys.argv = [kind, *rest[1:]]
    if kind == "-c":
        module = type(sys)("__main__")
        sys.modules["__main__"] = module
        exec(compile(rest[0], "<string>", "exec"), vars(module))  # noqa: S102 - a test's code
    elif kind == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(kind).resolve().parent)
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    CLIENT = _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[3:])
    CLIENT = socket.socket(fileno=fcntl.fcntl(CLIENT.detach(), fcntl.F_DUPFD_CLOEXEC, _FREE))
    with suppress(FileNotFoundError):  # the client was killed
        _enter_namespaces(CLIENT)
    PROGRAM = _receive(CLIENT)
    _guard(CLIENT)
    CLIENT.close()
    _become(*PROGRAM, sys.argv[2])
    _end(_run(PROGRAM[1]))
