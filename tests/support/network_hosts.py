"""Hosts on one machine: network namespaces with a name, a network and a working folder each.

A host sees the files of the machine, but not what other hosts write in the working folder: they
have no shared file system.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "eth0"
_SSH = """#!/bin/sh
exec {ssh} -F none -i {folder}/key -o UserKnownHostsFile=/dev/null "$@"
"""
_SSHD_CONFIG = """HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PermitRootLogin yes
PidFile none
SetEnv PATH={path}
"""
_ENTER = """#!/bin/sh
exec nsenter --net=/run/netns/{name} unshare --uts --mount sh -ec '
  mount --bind {names} /etc/hosts; mount --bind {names}.order /etc/nsswitch.conf
  hostname {name}; mount --bind {own} {shared}
  cd {shared}; exec "$@"' host "$@"
"""


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


@dataclass
class Host:
    """One of the hosts.

    Attributes:
        name: Its host name, which all hosts resolve.
        address: Its IPv4 address.
        folder: What it sees at ``shared`` of `make_hosts`.
        shared: That folder. A host may have mounted another one there.
    """

    name: str
    address: str
    folder: Path
    shared: Path

    def start(self, command, **variables):
        """Start a command on this host; its output can be read from the process."""
        path = os.pathsep.join([str(self.folder.parent / "bin"), os.environ["PATH"]])
        common = {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1", "PATH": path}
        return subprocess.Popen(
            [self.folder.parent / f"enter-{self.name}", *map(str, command)],
            env=os.environ | common | variables,
            cwd=self.shared,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def set_link(self, state):
        """Connect ("up") or disconnect ("down") the host."""
        _run(f"ip -n {self.name} link set {INTERFACE} {state}")

    def lose_packets(self, share):
        """Drop this share of the packets that the host sends, at random."""
        device = f"tc -n {self.name}"
        kept = "4294967295"  # the class of the filter; 0 is the next filter
        program = f"4,32 0 0 4294963256,53 1 0 {round(share * 2**32)},6 0 0 0,6 0 0 {kept},"
        _run(f"{device} qdisc add dev {INTERFACE} root handle 1: htb default 2")
        for number, queue in ((1, "pfifo limit 1000"), (2, "pfifo limit 0")):
            _run(f"{device} class add dev {INTERFACE} parent 1: classid 1:{number} htb rate 10gbit")
            _run(f"{device} qdisc add dev {INTERFACE} parent 1:{number} {queue}")
        where = f"dev {INTERFACE} parent 1: protocol all"
        _run(f"{device} filter add {where} bpf bytecode '{program}' flowid 1:1")

    def count_lost(self):
        """Return the number of packets that were dropped so."""
        classes = subprocess.check_output(
            ["tc", "-n", self.name, "-s", "class", "show", "dev", INTERFACE], text=True
        )
        return sum(map(int, re.findall(r"dropped (\d+)", classes)))

    def send_signal(self, number):
        """Send a signal to all processes of the host."""
        listing = subprocess.check_output(["ip", "netns", "pids", self.name], text=True)
        for process in listing.split():
            with suppress(ProcessLookupError):
                os.kill(int(process), number)


def start_sshd(hosts):
    """Start the ssh server of each host; ``ssh`` on a host then reaches it."""
    sshd, ssh, folder = shutil.which("sshd"), shutil.which("ssh"), hosts[0].folder.parent
    _run(f"ssh-keygen -q -t ed25519 -N '' -f {folder}/key")
    _write_program(folder / "bin" / "ssh", _SSH.format(ssh=ssh, folder=folder))
    path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    (folder / "sshd_config").write_text(_SSHD_CONFIG.format(folder=folder, path=path))
    Path("/run/sshd").mkdir(exist_ok=True)
    for host in hosts:
        statuses, outputs = wait_for([host.start([sshd, "-f", folder / "sshd_config"])])
        assert statuses == [0], outputs


@contextmanager
def make_hosts(count, folder, small_disk=None):
    """Make hosts that are connected by one switch; remove them and their processes at the end.

    Args:
        count: The number of hosts.
        folder: A folder for their files.
        small_disk: The size in bytes of the disk of the last host's working folder.
    """
    tag = f"d9m{os.getpid()}"
    shared = Path(folder) / "shared"
    addresses = {f"{tag}h{number}": f"10.77.0.{number + 1}" for number in range(count)}
    names = Path(folder) / "hosts"
    names.write_text(
        "127.0.0.1 localhost\n"
        + "".join(f"{address} {name}\n" for name, address in addresses.items())
    )
    # Without DNS: a name that is not in the file is unknown at once.
    names.with_suffix(".order").write_text("hosts: files\n")
    shared.mkdir(parents=True)
    (Path(folder) / "bin").mkdir()
    with ExitStack() as stack:
        _run(f"ip netns add {tag}")
        stack.callback(_run, f"ip netns delete {tag}")
        _run(f"ip -n {tag} link add switch type bridge")
        _run(f"ip -n {tag} link set switch up")
        hosts = []
        for number, (name, address) in enumerate(addresses.items()):
            own = Path(folder) / name
            own.mkdir()
            if small_disk and number == count - 1:
                _run(f"mount -t tmpfs -o size={small_disk} tmpfs {own}")
                stack.callback(_run, f"umount --lazy {own}")
            words = {"name": name, "names": names, "own": own, "shared": shared}
            _write_program(Path(folder) / f"enter-{name}", _ENTER.format(**words))
            _run(f"ip netns add {name}")
            stack.callback(_run, f"ip netns delete {name}")
            _run(f"ip -n {tag} link add port{number} type veth peer name {INTERFACE} netns {name}")
            _run(f"ip -n {tag} link set port{number} master switch up")
            _run(f"ip -n {name} address add {address}/24 dev {INTERFACE}")
            _run(f"ip -n {name} link set {INTERFACE} up")
            _run(f"ip -n {name} link set lo up")
            hosts.append(Host(name, address, own, shared))
            stack.callback(hosts[-1].send_signal, signal.SIGKILL)
        yield hosts


def _write_program(path, text):
    path.write_text(text)
    path.chmod(0o755)


def start_rank(hosts, rank, command, **variables):
    """Start the process of a rank, which has a host of its own."""
    return hosts[rank].start(
        command,
        RANK=str(rank),
        LOCAL_RANK="0",
        GROUP_RANK=str(rank),
        WORLD_SIZE=str(len(hosts)),
        LOCAL_WORLD_SIZE="1",
        GROUP_WORLD_SIZE=str(len(hosts)),
        MASTER_ADDR=hosts[0].name,
        MASTER_PORT="29511",
        TORCHELASTIC_RUN_ID="d9m",
        **variables,
    )


def wait_until(condition, processes=(), timeout=240):
    """Wait until a condition is true, which it must become before one of the processes ends."""
    end = time.monotonic() + timeout
    while not condition():
        ended = [process for process in processes if process.poll() is not None]
        assert not ended, ended[0].stdout.read()
        assert time.monotonic() < end, "the time is over"
        time.sleep(0.02)


def wait_for(processes, timeout=240):
    """Return the statuses and outputs of processes, which are killed if one takes too long."""
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], outputs
