#!/bin/bash
# Run the cases of portable bits and the digits example in an emulated Intel CPU with AVX-512.
#   portable_avx512.sh FOLDER PYTHON [CPU]
# For machines without AVX-512. Needs root (loop devices, chroot), Debian bookworm on amd64, cpio, a
# C++ compiler, 6 GB of disk, 3 GB of memory. PYTHON is the interpreter of a virtual environment with
# torch's CPU build, lightning and scikit-learn. CPU is one of `bochs -help cpu`; Linux 6.1 did not
# boot with corei7_icelake_u and sapphire_rapids of the emulator's snapshot of August 2026. A run
# boots in about 2 minutes, the cases take about half an hour, the digits example an hour.
set -euo pipefail
repository=$(git -C "$(dirname "$0")" rev-parse --show-toplevel)
mkdir -p "$1"; cd "$1"; work=$PWD; python=$2; cpu=${3:-corei7_skylake_x}; linux=6.1.0-50-amd64

# 1. The emulator, from its sources: Bochs emulates each instruction, with its own floating point.
if [ ! -x bochs/bin/bochs ]; then
  [ -d sources ] || git clone --depth 1 https://github.com/bochs-emu/Bochs sources
  # The snapshot refuses gathers with an index register above zmm15, which MKL's erf uses.
  sed -i "s/^ *i->setSibIndex(i->sibIndex() | (vvv & 0x10));/& vvv \&= 0xf;/" \
    sources/bochs/cpu/decoder/fetchdecode32.cc
  mkdir -p build
  (cd build && ../sources/bochs/configure --prefix="$work/bochs" --enable-cpu-level=6 \
    --enable-x86-64 --enable-avx --enable-evex --enable-all-optimizations --enable-pci \
    --enable-handlers-chaining --enable-repeat-speedups --enable-fast-function-calls \
    --with-nogui CXXFLAGS="-O2 -march=native" CFLAGS="-O2 -march=native" &&
    make -j2 && make install) > build.log 2>&1
fi

# 2. Linux, a shell and a boot loader, from Debian's packages.
if [ ! -d packages ]; then
  apt-get download linux-image-$linux busybox-static extlinux syslinux-common
  for one in ./*.deb; do dpkg -x "$one" packages; done
fi
busybox=$(find packages/ -path '*bin/busybox' | head -1)

# 3. A boot disk: the kernel, and a first program with the modules of disk and file system. The
# emulated machine was shown to boot without 5-level page tables, protection keys, security modules.
if [ ! -f boot.img ]; then
  mkdir -p first/{bin,modules,dev,proc,sys,root} mounted
  cp "$busybox" first/bin/
  ln -sf busybox first/bin/sh
  modules="lib/crc16 lib/crc64 crypto/crct10dif_common crypto/crct10dif_generic lib/crc-t10dif
    crypto/crc64_rocksoft_generic lib/crc64-rocksoft block/t10-pi drivers/scsi/scsi_common
    drivers/scsi/scsi_mod drivers/ata/libata drivers/ata/ata_piix drivers/scsi/sd_mod
    crypto/crc32c_generic lib/libcrc32c fs/mbcache fs/jbd2/jbd2 fs/ext4/ext4"
  for one in $modules; do cp packages/lib/modules/$linux/kernel/$one.ko first/modules/; done
  cat > first/init <<EOF
#!/bin/sh
b=/bin/busybox
\$b mount -t devtmpfs d /dev; \$b mount -t proc p /proc; \$b mount -t sysfs s /sys
for one in $(basename -a $modules | tr '\n' ' '); do \$b insmod /modules/\$one.ko; done
while [ ! -b /dev/sdc ]; do \$b sleep 1; done
\$b mount -t ext4 -o ro /dev/sdb /root
for one in dev proc sys; do \$b mount --move /\$one /root/\$one; done
\$b mount -t tmpfs t /root/tmp
\$b tr -d '\000' < /root/dev/sdc > /root/tmp/job.sh
\$b chroot /root /bin/sh /tmp/job.sh
\$b poweroff -f
EOF
  chmod +x first/init
  (cd first && find . | cpio -o -H newc --quiet) > first.img
  truncate -s 64M boot.img; mke2fs -q -t ext2 -O none boot.img; mount -o loop boot.img mounted
  cp packages/boot/vmlinuz-$linux mounted/vmlinuz; cp first.img mounted/
  cat > mounted/extlinux.conf <<'EOF'
default one
label one
 kernel /vmlinuz
 append initrd=/first.img console=ttyS0,115200 nokaslr mitigations=off no5lvl nopku nosmp lsm= audit=0 nowatchdog tsc=reliable random.trust_cpu=on
EOF
  cp packages/usr/lib/syslinux/modules/bios/ldlinux.c32 mounted/
  "$(find packages/ -name extlinux -type f -perm /1)" --install mounted
  umount mounted
fi

# 4. A disk with Python, the virtual environment, the libraries that they load, and the package.
if [ ! -f root.img ]; then
  truncate -s 6G root.img; mke2fs -q -t ext4 -O ^has_journal -m 0 root.img; mkdir -p mounted
  mount -o loop root.img mounted
  mkdir -p mounted/{proc,sys,dev,tmp,bin,package}
  for prefix in $("$python" -c 'import sys; print(sys.base_prefix, sys.prefix)'); do
    tar -C / --exclude=__editable__* --exclude=_editable_impl_* -cf - ".$prefix" |
      tar -C mounted -xf -
  done
  git -C "$repository" archive HEAD | tar -C mounted/package -xf -
  find mounted \( -name '*.so*' -o -path '*/bin/python3*' \) -type f -print0 |
    { xargs -0 ldd 2>/dev/null || true; } | grep -oE '(=> |^\s+)/(usr/)?lib(64)?/[^ ]+' |
    grep -oE '/.*' | sort -u |
    while read -r one; do mkdir -p "mounted$(dirname "$one")"; cp -L "$one" "mounted$one"; done
  cp "$busybox" mounted/bin/
  for one in sh cat grep dmesg; do ln -sf busybox mounted/bin/$one; done
  umount mounted
fi

# 5. Two machines, one after the other. The serial port's file has what they print.
setting="export HOME=/tmp TMPDIR=/tmp OMP_NUM_THREADS=1 PYTHONHASHSEED=0 TERM=dumb PATH=/bin
  PYTHONPATH=/package PYTHONDONTWRITEBYTECODE=1; dmesg -n 1; cd /tmp;
  grep -E 'model name|flags' /proc/cpuinfo"
cases='import json, sys, torch; sys.path.append("/package/tests/support")
import portable_cases as p
print(torch.__version__, torch.backends.cpu.get_cpu_capability(), flush=True)
wanted = json.load(open("/package/tests/support/portable_digests.json"))
for n in p.CASES: d = p._run([n])[n]; print(n, d, d == wanted[n], flush=True)'
digits='import os, runpy, sys; os.environ["LIGHTNING_D9M_PORTABLE"] = "1"; import lightning_d9m
sys.argv = ["/package/examples/digits.py", "--epochs", "1"]
with lightning_d9m.portable(): runpy.run_path(sys.argv[0], run_name="__main__")'
for job in cases digits; do
  truncate -s 1M $job.img
  printf '%s\n' "${setting//$'\n'/ }" \
    "$python -W ignore -uc '${!job}' 2>&1 | cat" | dd of=$job.img conv=notrunc status=none
  printf '%s\n' "display_library: nogui" "cpu: model=$cpu, ips=100000000, ignore_bad_msrs=1" \
    "memory: guest=2048, host=2048" "pci: enabled=1, chipset=i440fx" "boot: disk" \
    "romimage: file=$work/bochs/share/bochs/BIOS-bochs-latest, options=fastboot" \
    "vgaromimage: file=$work/bochs/share/bochs/VGABIOS-lgpl-latest.bin" \
    "ata0-master: type=disk, path=$work/boot.img, mode=volatile" \
    "ata0-slave: type=disk, path=$work/root.img, mode=volatile" \
    "ata1: enabled=1, ioaddr1=0x170, ioaddr2=0x370, irq=15" \
    "ata1-master: type=disk, path=$work/$job.img, mode=volatile" \
    "com1: enabled=1, mode=file, dev=$work/$job.txt" "log: $work/$job.log" > $job.bochsrc
  TMPDIR=$work nice -n 5 bochs/bin/bochs -q -f $job.bochsrc > $job.out 2>&1 < /dev/null || true
  grep -E '^[^[]*(True|False|weights)' $job.txt || true
done
