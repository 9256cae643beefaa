"""Delay the packets between two hosts of ``tests/support/network_hosts.py``.

The kernel that this ran on has no ``tc netem``. In place of the link between the hosts each gets a
TUN device, and one process carries packets from one to the other when they are due. Packets are as
large as TUN allows, so that one process can carry a gigabyte a second.
"""

import collections
import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

_CREATE = 0x400454CA  # TUNSETIFF
_TUN_WITHOUT_HEADER = 0x1001
_NEW_NETWORK = 0x40000000
_LARGEST = 65_535


@contextmanager
def delayed(hosts, interface, milliseconds):
    """Delay each packet by so much while the context lasts; 0 leaves the link as it is."""
    if not milliseconds:
        yield
        return
    for host in hosts:
        _ip(host, "link", "delete", interface)
    names = [host.name for host in hosts]
    command = [sys.executable, __file__, interface, str(milliseconds / 1e3), *names]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as relay:
        try:
            relay.stdout.readline()
            for host in hosts:
                _ip(host, "address", "add", f"{host.address}/24", "dev", interface)
                large = ("mtu", "65000", "txqueuelen", "10000")
                _ip(host, "link", "set", interface, *large, "up")
            yield
        finally:
            relay.kill()


def _ip(host, *words):
    subprocess.run(["ip", "-n", host.name, *words], check=True)


def open_tun(host, interface):
    """Return the file of a new TUN device in the network namespace of a host."""
    with Path(f"/run/netns/{host}").open() as namespace:
        if ctypes.CDLL(None).setns(namespace.fileno(), _NEW_NETWORK):
            raise OSError(f"The namespace of {host} cannot be entered.")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH22x", interface.encode(), _TUN_WITHOUT_HEADER)
    fcntl.ioctl(device, _CREATE, request)
    return device


def carry(devices, seconds):
    """Carry packets between two devices, each after so many seconds; never returns."""
    others = dict(zip(devices, reversed(devices), strict=True))
    waiting = collections.deque()  # (when it is due, where to, packet), in order
    while True:
        timeout = max(0.0, waiting[0][0] - time.perf_counter()) if waiting else None
        for device in select.select(devices, [], [], timeout)[0]:
            due = time.perf_counter() + seconds
            waiting.append((due, others[device], os.read(device, _LARGEST)))
        while waiting and waiting[0][0] <= time.perf_counter():
            _, device, packet = waiting.popleft()
            with suppress(OSError):  # the other device is not up yet
                os.write(device, packet)


if __name__ == "__main__":
    opened = [open_tun(host, sys.argv[1]) for host in sys.argv[3:]]
    print("ready", flush=True)
    carry(opened, float(sys.argv[2]))
