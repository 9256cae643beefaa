"""Memory that all processes of one host share."""

import mmap
import os
import secrets
import socket
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from lightning_d9m.engine.ranks.groups import ranks_of_group
from lightning_d9m.errors import D9mError

# One chunk is packed while another is folded and a third is collected.
_SLOTS = 3
_SLOT_BYTES = 3 * 2**19  # 1.5 MiB: smaller ones cost more waits, larger ones more memory
_SECRET_BYTES = 16
# A connection to a listener waits only while its queue is full, and that holds all processes.
_CONNECT_SECONDS = 60.0


class SharedMemory:
    """Slots of memory of each process, which all processes read and write.

    The processes wait for each other by sockets, so that the end of a process is an error in all
    others at once.

    The sockets, one to each other process, become this object's.

    Attributes:
        slot_bytes: The size of a slot.
        taken: How many chunks have been summed, the same on every process.
    """

    def __init__(self, memory: mmap.mmap, sockets: list[socket.socket], timeout: timedelta) -> None:
        self._sockets = sockets
        for each in sockets:
            each.settimeout(timeout.total_seconds())
            # Not before: a thread may still wait, and another file could get the socket's number.
            weakref.finalize(self, each.close)
        # The tensor keeps the mapping alive, and the mapping needs no file.
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self.slot_bytes = len(memory) // (_SLOTS * (len(sockets) + 1))
        self.taken = 0

    def slot(self, process: int, number: int, dtype: torch.dtype) -> Tensor:
        """Return the memory of a process for a chunk."""
        start = (process * _SLOTS + number % _SLOTS) * self.slot_bytes
        return self._bytes[start : start + self.slot_bytes].view(dtype)

    def meet(self) -> None:
        """Wait until all processes are here.

        Raises:
            DistNetworkError: A process has ended or closed its sockets, or does not come in time.
        """
        try:
            for each in self._sockets:
                # All are sent before the first is read, or each process would wait for the next
                # one. A byte fits into the buffer of a socket, so that no send waits.
                each.send(b"\0")
            if all(each.recv(1) for each in self._sockets):
                return
            cause = "Connection closed by peer"
        except TimeoutError:
            cause = "it timed out, as a process is not here"
        except OSError as error:
            cause = f"Connection closed by peer: {error}"
        raise distributed.DistNetworkError(f"A sum in shared memory failed: {cause}.")

    def disconnect(self) -> None:
        """Let all processes that wait here fail, and this one."""
        for each in self._sockets:
            with suppress(OSError):  # the other process has ended
                # The other end reads the end of the file at once. The socket stays open, as a
                # thread of this process may read it.
                each.shutdown(socket.SHUT_RDWR)


def open_shared_memory(process: int, processes: int, group: Any) -> SharedMemory | None:
    """Share memory among the processes of a group; every process must call this.

    The memory has no name, so it ends with the processes.

    Returns:
        None on every process if one of them is on another host or gets no memory.
    """
    opening, ranks = _Opening(process, processes), ranks_of_group(group)
    try:
        # Each step needs that the one before has succeeded on all processes.
        addresses = ranks.gather_bytes(ranks.raise_on_all(opening.listen))
        ranks.raise_on_all(lambda: opening.connect(addresses))
        memory = ranks.raise_on_all(lambda: opening.map(addresses))
        order = [(process + distance) % processes for distance in range(1, processes)]
        sockets = [opening.sockets.pop(peer) for peer in order]  # the next process comes first
    # A system may have no such memory or sockets, or process 0 has closed that of this one.
    except (OSError, AttributeError, ValueError, D9mError):
        return None
    finally:
        opening.close()
    # The wait for others has the limit that the user has given for collectives.
    if hasattr(group, "_get_backend"):  # of torch.distributed, around that of Gloo
        group = group._get_backend(torch.device("cpu"))  # noqa: SLF001 - not public
    options = getattr(group, "options", None)
    timeout = getattr(options, "_timeout", distributed.default_pg_timeout)
    return SharedMemory(memory, sockets, timeout)


class _Opening:
    """The steps by which a process opens shared memory with the others.

    Process 0 makes the memory. A socket of the others gets it only on the same host.
    """

    def __init__(self, process: int, processes: int) -> None:
        self._process, self._processes = process, processes
        self._size = processes * _SLOTS * _SLOT_BYTES
        self._file = -1
        self._listener: socket.socket | None = None
        self.sockets: dict[int, socket.socket] = {}

    def listen(self) -> bytes:
        """Let the other processes connect; return the address and a secret."""
        if self._process == 0:
            # Memory without a name: a file in /dev/shm would stay if the process is killed.
            self._file = os.memfd_create("lightning_d9m")
            # So a lack of memory is an error here, which all processes learn of. Otherwise the
            # first write would end the process by a signal.
            os.posix_fallocate(self._file, 0, self._size)
        name, secret = secrets.token_hex(_SECRET_BYTES), secrets.token_bytes(_SECRET_BYTES)
        self._listener = socket.socket(socket.AF_UNIX)
        # The first byte makes the address abstract: it is in no folder, ends with the socket, and
        # is known on this host only. Every process of the host can connect, so the secret tells who
        # belongs to the group.
        self._listener.bind(f"\0{name}")
        self._listener.listen(self._processes)
        self._listener.settimeout(0)
        return secret + name.encode()

    def connect(self, addresses: Sequence[bytes]) -> None:
        """Connect to the processes before this one, which need not answer yet."""
        secret = addresses[self._process][:_SECRET_BYTES]
        for peer, address in enumerate(addresses[: self._process]):
            link = self.sockets[peer] = socket.socket(socket.AF_UNIX)
            link.settimeout(_CONNECT_SECONDS)
            link.connect(b"\0" + address[_SECRET_BYTES:])
            # It is sent before anyone accepts: a listener's queue takes connections, so no process
            # waits for another here.
            link.sendall(secret + self._process.to_bytes(_SECRET_BYTES, "little"))

    def map(self, addresses: Sequence[bytes]) -> mmap.mmap:
        """Accept the processes after this one, and map the memory."""
        assert self._listener is not None
        try:
            while len(self.sockets) < self._processes - 1:
                # All have connected before this step, so the listener need not wait.
                link, _ = self._listener.accept()
                peer = _identify(link, addresses)
                if peer is None:
                    link.close()
                    continue
                self.sockets[peer] = link
                if self._process == 0:
                    socket.send_fds(link, [b"\0"], [self._file])
            if self._process:
                _, (self._file,), _, _ = socket.recv_fds(self.sockets[0], 1, 1)
            return mmap.mmap(self._file, self._size)
        except OSError:
            self.close()  # no process waits for this one
            raise

    def close(self) -> None:
        """Close what is open."""
        for link in (self._listener, *self.sockets.values()):
            if link is not None:
                link.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _identify(link: socket.socket, addresses: Sequence[bytes]) -> int | None:
    """Return the process that has connected, or None if it is none of the group."""
    with suppress(BlockingIOError):  # all processes of the group have sent their word before
        word = link.recv(2 * _SECRET_BYTES, socket.MSG_DONTWAIT)
        peer = int.from_bytes(word[_SECRET_BYTES:], "little")
        if peer < len(addresses) and secrets.compare_digest(
            word[:_SECRET_BYTES], addresses[peer][:_SECRET_BYTES]
        ):
            return peer
    return None
