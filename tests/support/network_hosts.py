"""Hosts on one machine: network namespaces with a name, a network and a working folder each.

A host sees the files of the machine, but not what other hosts write in the working folder: they
have no shared file system.
"""

import os
import shlex
import subprocess
from contextlib import ExitStack, contextmanager
from pathlib import Path

INTERFACE = "eth0"


def explain_missing():
    """Return why no hosts can be made here; empty if they can."""
    probe = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "ip", "link", "add", "d9m", "type", "bridge"],
        check=False,
        capture_output=True,
        text=True,
    )
    return "" if probe.returncode == 0 else f"no network namespaces: {probe.stderr.strip()}"


def _run(command):
    subprocess.run(shlex.split(command), check=True, capture_output=True, text=True)


class Host:
    """One of the hosts.

    Attributes:
        name: Its host name, which all hosts resolve.
        address: Its IPv4 address.
        folder: What it sees at ``shared`` of `make_hosts`.
    """

    def __init__(self, name, address, names, folder, shared):
        self.name = name
        self.address = address
        self.folder = folder
        self._names = names
        self._shared = shared

    def start(self, command, **variables):
        """Start a command on this host; its output can be read from the process."""
        mounts = f"mount --bind {self._names} /etc/hosts; hostname {self.name}; "
        mounts += f"mount --bind {self.folder} {self._shared}; cd {self._shared}; "
        enter = ["nsenter", f"--net=/run/netns/{self.name}", "unshare", "--uts", "--mount"]
        return subprocess.Popen(
            [*enter, "sh", "-ec", f'{mounts}exec "$@"', "host", *map(str, command)],
            env=os.environ | {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"} | variables,
            cwd=self._shared,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def set_link(self, state):
        """Connect ("up") or disconnect ("down") the host."""
        _run(f"ip -n {self.name} link set {INTERFACE} {state}")


@contextmanager
def make_hosts(count, folder):
    """Make hosts that are connected by one switch; remove them at the end.

    Args:
        count: The number of hosts.
        folder: A folder for their files.
    """
    tag = f"d9m{os.getpid()}"
    shared = Path(folder) / "shared"
    addresses = {f"{tag}h{number}": f"10.77.0.{number + 1}" for number in range(count)}
    names = Path(folder) / "hosts"
    names.write_text(
        "127.0.0.1 localhost\n"
        + "".join(f"{address} {name}\n" for name, address in addresses.items())
    )
    shared.mkdir(parents=True)
    with ExitStack() as stack:
        _run(f"ip netns add {tag}")
        stack.callback(_run, f"ip netns delete {tag}")
        _run(f"ip -n {tag} link add switch type bridge")
        _run(f"ip -n {tag} link set switch up")
        hosts = []
        for number, (name, address) in enumerate(addresses.items()):
            own = Path(folder) / name
            own.mkdir()
            _run(f"ip netns add {name}")
            stack.callback(_run, f"ip netns delete {name}")
            _run(f"ip -n {tag} link add port{number} type veth peer name {INTERFACE} netns {name}")
            _run(f"ip -n {tag} link set port{number} master switch up")
            _run(f"ip -n {name} address add {address}/24 dev {INTERFACE}")
            _run(f"ip -n {name} link set {INTERFACE} up")
            _run(f"ip -n {name} link set lo up")
            hosts.append(Host(name, address, names, own, shared))
        yield hosts


def wait_for(processes, timeout=240):
    """Return the statuses and outputs of processes, which are killed if one takes too long."""
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], outputs
