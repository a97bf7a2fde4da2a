#!/bin/busybox sh
# The guest's first process: modules, the host's root read-only under a layer that is forgotten, then the script of the kernel's command line.
B=/bin/busybox
$B mount -t proc proc /proc
$B mount -t sysfs sys /sys
$B mount -t devtmpfs dev /dev
for module in /modules/*.ko; do $B insmod "$module" || $B echo "no module $module"; done
$B mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=512000,cache=loose host /host
$B mount -t tmpfs -o size=2g layer /layer
$B mkdir /layer/upper /layer/work
$B mount -t overlay -o lowerdir=/host,upperdir=/layer/upper,workdir=/layer/work tree /tree
$B mount -t proc proc /tree/proc
$B mount -t sysfs sys /tree/sys
$B mount --bind /dev /tree/dev
$B mkdir -p /tree/dev/shm
$B mount -t tmpfs shm /tree/dev/shm
$B mount -t tmpfs run /tree/run
for word in $($B cat /proc/cmdline); do
    case $word in
        octavo.run=*) run=${word#octavo.run=} ;;
        octavo.python=*) python=${word#octavo.python=} ;;
        octavo.root=*) root=${word#octavo.root=} ;;
    esac
done
OCTAVO_PYTHON=$python OCTAVO_ROOT=$root $B chroot /tree /bin/bash "$run"
$B echo "octavo-guest: $?"
$B poweroff -f
