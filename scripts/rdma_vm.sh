#!/usr/bin/env bash
# Run a command in a throw-away virtual machine that has an RDMA device: Soft-RoCE (`rxe0`) on the kernel of Debian.
#
#   scripts/rdma_vm.sh COMMAND [ARGUMENT…]                  one guest; rxe0 on a dummy interface
#   scripts/rdma_vm.sh --peer 'SHELL COMMAND' COMMAND …     a second guest, joined by a virtual cable, runs SHELL COMMAND
#                                                           until COMMAND has ended in the first
#
# A guest sees this machine's files at their own paths, read-only below a layer of memory: the same Python, the same
# checkout; what it writes is gone with it, but for files below $RDMA_VM_SHARED, which both guests and this machine see.
# The exit status is COMMAND's, or 125 where a guest ended without one. The first guest is 10.99.0.1, the second .2.
# The device is emulated by the guest's kernel, and without /dev/kvm so is the processor: for correctness, not for speed.
# Takes Debian 12, root, and apt; about 100 MB are fetched the first time.
set -euo pipefail

CACHE=${RDMA_VM_CACHE:-/var/cache/halfmoon-rdma-vm}
MEMORY=${RDMA_VM_MEMORY:-3G}
CPUS=${RDMA_VM_CPUS:-2}
LIMIT_S=${RDMA_VM_LIMIT_S:-600}
PACKAGES=(qemu-system-x86 busybox-static kmod cpio iproute2 ibverbs-providers python3-pyverbs)
# crc32_generic: rxe looks for it when its first device is made, and nobody in the initramfs could load it then.
MODULES=(virtio_pci virtio_net 9pnet_virtio 9p overlay dummy crc32_generic rdma_rxe ib_uverbs)

fail() { echo "rdma_vm: $*" >&2; exit 125; }

install_packages() {
  local missing=() package
  for package in "${PACKAGES[@]}"; do
    dpkg-query -W -f '${db:Status-Abbrev}' "$package" 2>/dev/null | grep -q '^ii' || missing+=("$package")
  done
  [ ${#missing[@]} -eq 0 ] && return
  command -v apt-get >/dev/null || fail "needs ${missing[*]}, and there is no apt-get to install them with"
  { apt-get update -q && apt-get install -y -q --no-install-recommends "${missing[@]}"; } >&2 ||
    fail "can't install ${missing[*]}"
}

# The kernel of the distribution, and an initramfs with a busybox and the modules that a guest needs.
make_boot_files() {
  local made_by
  made_by=$(sha256sum < "$0")
  [ -s "$CACHE/vmlinuz" ] && [ -s "$CACHE/initramfs" ] && [ "$(cat "$CACHE/made-by" 2>/dev/null)" = "$made_by" ] && return
  local work package version module number=100
  work=$(mktemp -d "$CACHE/build.XXXXXX")
  package=$(apt-cache depends linux-image-amd64 | awk '/Depends: linux-image/ { print $2; exit }')
  version=${package#linux-image-}
  (cd "$work" && apt-get download -q -o APT::Sandbox::User=root "$package" >&2) || fail "can't fetch $package"
  dpkg-deb -x "$work/$package"_*.deb "$work/kernel"
  depmod -b "$work/kernel" "$version"
  mkdir -p "$work"/image/{bin,modules,proc,sys,dev,host,layer,new}
  cp /bin/busybox "$work/image/bin/"
  modprobe -d "$work/kernel" -S "$version" --show-depends -a "${MODULES[@]}" |
    awk '$1 == "insmod" && !seen[$2]++ { print $2 }' |
    while read -r module; do cp "$module" "$work/image/modules/$((number++))-${module##*/}"; done
  write_init > "$work/image/init"
  chmod +x "$work/image/init"
  (cd "$work/image" && find . | cpio --quiet -o -H newc | gzip -1) > "$work/initramfs"
  mv "$work"/kernel/boot/vmlinuz-* "$CACHE/vmlinuz"
  mv "$work/initramfs" "$CACHE/initramfs"
  echo "$made_by" > "$CACHE/made-by"
  rm -rf "$work"
}

# First in the guest: load the modules, lay memory over the host's files, and go on in there. The layer claims more room
# than there is memory, and takes what is written: a NATS server sizes its limits by what it sees.
write_init() {
  cat <<'INIT'
#!/bin/busybox sh
b=/bin/busybox
over_9p=trans=virtio,version=9p2000.L,msize=512000
$b mount -t proc proc /proc
$b mount -t sysfs sys /sys
$b mount -t devtmpfs dev /dev
exec </dev/console >/dev/console 2>&1
for module in /modules/*; do $b insmod $module || echo "rdma_vm: can't load $module"; done
$b mount -t 9p -o $over_9p,ro,cache=loose host /host &&
  $b mount -t tmpfs -o size=32g layer /layer && $b mkdir /layer/upper /layer/work &&
  $b mount -t overlay -o lowerdir=/host,upperdir=/layer/upper,workdir=/layer/work root /new || $b poweroff -f
for each in proc sys dev; do $b mount --move /$each /new/$each; done
$b mkdir -p /new/run/guest /new/dev/pts /new/dev/shm
$b mount -t 9p -o $over_9p guest /new/run/guest
$b mount -t devpts pts /new/dev/pts
$b mount -t tmpfs shm /new/dev/shm
exec $b switch_root /new /bin/bash /run/guest/begin
INIT
}

# Second in the guest: its network, its device, and the command. $1: its own folder; $2: its address.
write_begin() {
  cat > "$1/begin" <<BEGIN
stty -F /dev/console -opost
mkdir -p $(printf %q "$SHARED")
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000 shared $(printf %q "$SHARED")
ip link set lo up
interface=eth0
[ -e /sys/class/net/eth0 ] || { interface=roce0; ip link add roce0 type dummy; }
ip link set \$interface mtu 4200 up
ip addr add $2/24 dev \$interface
rdma link add rxe0 type rxe netdev \$interface || echo "rdma_vm: no rxe0" >&2
ulimit -l unlimited
bash /run/guest/command < /dev/null
echo \$? > /run/guest/status
sync
echo o > /proc/sysrq-trigger
while :; do :; done
BEGIN
}

# $1: the guest's folder, with `command` in it; $2: its address; further: arguments of qemu. Becomes qemu.
boot() {
  local folder=$1 address=$2 accelerator=tcg processor=max
  shift 2
  write_begin "$folder" "$address"
  # Some hosts have a /dev/kvm that no stock kernel boots under; those show neither svm nor vmx.
  if grep -qwE 'svm|vmx' /proc/cpuinfo && (: < /dev/kvm) 2>/dev/null; then accelerator=kvm processor=host; fi
  exec timeout "$LIMIT_S" qemu-system-x86_64 -M q35 -accel $accelerator -cpu $processor -smp "$CPUS" -m "$MEMORY" \
    -display none -nodefaults -no-reboot -kernel "$CACHE/vmlinuz" -initrd "$CACHE/initramfs" \
    -append "console=ttyS0,115200 quiet loglevel=1 mitigations=off panic=-1" \
    -chardev stdio,id=console,signal=off -serial chardev:console \
    $(folder_device host / ,readonly=on) $(folder_device guest "$folder") $(folder_device shared "$SHARED") "$@" < /dev/null
}

folder_device() {
  echo -fsdev "local,id=$1,path=$2,security_model=passthrough,multidevs=remap${3:-}"
  echo -device "virtio-9p-pci,fsdev=$1,mount_tag=$1"
}

cable() { echo -netdev "dgram,id=cable,local.type=unix,local.path=$1,remote.type=unix,remote.path=$2"; \
          echo -device "virtio-net-pci,netdev=cable,mac=52:54:00:99:00:0$3,host_mtu=4200"; }

environment() { export -p; printf 'cd %q\n' "$PWD"; }

peer=
if [ "${1:-}" = --peer ]; then peer=${2:?--peer takes a shell command}; shift 2; fi
[ $# -gt 0 ] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 64; }
[ "$(id -u)" = 0 ] || fail "run it as root: the guest's files are this machine's, with their owners"
mkdir -p "$CACHE"
{ flock 9; install_packages; make_boot_files; } 9> "$CACHE/lock"

FOLDER=$(mktemp -d)
export RDMA_VM_SHARED=${RDMA_VM_SHARED:-$FOLDER/shared}
mkdir -p "$RDMA_VM_SHARED" "$FOLDER/first" "$FOLDER/second"
SHARED=$(realpath "$RDMA_VM_SHARED")
qemus=()
end() { [ ${#qemus[@]} -eq 0 ] || kill "${qemus[@]}" 2>/dev/null || true; wait; rm -rf "$FOLDER"; }
trap end EXIT
trap 'exit 143' TERM INT HUP

wire_first=() wire_second=()
if [ -n "$peer" ]; then
  read -r -d '' -a wire_first < <(cable "$FOLDER/a" "$FOLDER/b" 1; printf '\0')
  read -r -d '' -a wire_second < <(cable "$FOLDER/b" "$FOLDER/a" 2; printf '\0')
  { environment; echo "$peer"; } > "$FOLDER/second/command"
  (boot "$FOLDER/second" 10.99.0.2 "${wire_second[@]}") > "$FOLDER/second/console" & qemus+=($!)
fi
{ environment; printf '%q ' "$@"; echo; } > "$FOLDER/first/command"
(boot "$FOLDER/first" 10.99.0.1 "${wire_first[@]}") & first=$!
qemus+=("$first")
wait "$first" || true
[ -z "$peer" ] || { echo "--- the second guest said:"; cat "$FOLDER/second/console"; }
[ -s "$FOLDER/first/status" ] || fail "the guest ended without a status: it took more than $LIMIT_S s, or could not boot"
exit "$(cat "$FOLDER/first/status")"
