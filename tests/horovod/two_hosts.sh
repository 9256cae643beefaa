#!/bin/bash
# Train on two "hosts" of this machine: two network namespaces joined by a cable, each with an sshd.
#
#   sudo tests/horovod/two_hosts.sh COMMAND...     runs COMMAND on host1, with "ssh host2" at hand
#
# Example: sudo tests/horovod/two_hosts.sh horovodrun -np 4 -H host1:2,host2:2 \
#              --network-interfaces d9m0 python examples/horovod_digits.py
# Needs root, iproute2 and openssh-server. What it makes lies in one temporary folder and two
# namespaces, and is gone at its end.
set -eu
[ "$(id -u)" = 0 ] || { echo "two_hosts.sh: network namespaces need root." >&2; exit 77; }
for program in ip ssh sshd ssh-keygen; do
  PATH="$PATH:/usr/sbin" command -v "$program" >/dev/null ||
    { echo "two_hosts.sh: '$program' is missing (Debian: iproute2, openssh-server)." >&2; exit 77; }
done
SSHD=$(PATH="$PATH:/usr/sbin" command -v sshd)
folder=$(mktemp -d)
finish() {
  for file in "$folder"/host?.pid; do [ -e "$file" ] && kill "$(cat "$file")" || true; done
  ip netns delete d9m-host1 2>/dev/null || true
  ip netns delete d9m-host2 2>/dev/null || true
  rm -rf "$folder"
}
trap finish EXIT
ip netns add d9m-host1 2>/dev/null ||
  { echo "two_hosts.sh: this container may not make network namespaces." >&2; exit 77; }
ip netns add d9m-host2
ip -n d9m-host1 link add d9m0 type veth peer name d9m0 netns d9m-host2
mkdir -p /run/sshd
ssh-keygen -q -t ed25519 -N '' -f "$folder/key"
ssh-keygen -q -t ed25519 -N '' -f "$folder/hostkey"
cp "$folder/key.pub" "$folder/authorized"
# The hosts' own view of names, in place of DNS; ip netns shows it as /etc/hosts inside.
for number in 1 2; do
  host="d9m-host$number"
  mkdir -p "/etc/netns/$host"
  printf '127.0.0.1 localhost\n10.99.0.1 host1\n10.99.0.2 host2\n' >"/etc/netns/$host/hosts"
  ip -n "$host" link set lo up
  ip -n "$host" address add "10.99.0.$number/24" dev d9m0
  ip -n "$host" link set d9m0 up
  # Horovod's Gloo looks its host's own name up, whatever --network-interfaces says.
  ip netns exec "$host" unshare --uts sh -c 'hostname "$0"; exec "$@"' "host$number" "$SSHD" -f /dev/null -h "$folder/hostkey" -o Port=22 \
    -o "AuthorizedKeysFile=$folder/authorized" -o StrictModes=no -o UsePAM=no \
    -o PermitRootLogin=prohibit-password -o "PidFile=$folder/host$number.pid"
done
# horovodrun calls plain `ssh`: give it the key without touching ~/.ssh.
mkdir "$folder/bin"
printf '#!/bin/sh\nexec %s -i %s -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR "$@"\n' \
  "$(command -v ssh)" "$folder/key" >"$folder/bin/ssh"
chmod 755 "$folder/bin/ssh"
status=0
ip netns exec d9m-host1 unshare --uts sh -c 'hostname host1; exec "$@"' sh \
  env PATH="$folder/bin:$PATH" "$@" || status=$?
rm -rf /etc/netns/d9m-host1 /etc/netns/d9m-host2
exit "$status"
