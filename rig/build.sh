#!/bin/bash
# Builds the emulated host: prints a directory with vmlinuz, initrd and host.img for run.sh.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../scripts/lib.sh"
. "$here/../scripts/debian.sh"

# What rig-init loads; all else is loaded on demand, as on any host.
modules="virtio_net qemu_fw_cfg kvm_amd tun loop xfs"
packages=$(packages_in "$here/packages.txt")

# The slow half: packages only.
tree() {
	# shellcheck disable=SC2086
	debian_tree "$1/tree" $packages
}

image() {
	local out=$1 root=$1/root initramfs=$1/initramfs release module
	cp "$kernel/vmlinuz" "$out/vmlinuz"
	cp -a "$base/tree" "$root"
	cp -a "$kernel/modules" "$root/usr/lib/modules"
	install -m 755 "$here/rig-init" "$root/sbin/rig-init"
	mkdir -p "$root/payload" "$root/data"
	echo "$modules" >"$root/etc/rig-modules"
	echo rig >"$root/etc/hostname"
	printf '127.0.0.1 localhost rig\n::1 localhost rig\n' >"$root/etc/hosts"

	# What every start loads is unpacked here and now: in the emulated host, xz takes seconds. And busybox's insmod wants
	# modules unpacked, in the order of their dependencies.
	release=$(ls "$root/usr/lib/modules")
	depmod -b "$root" "$release"
	# shellcheck disable=SC2086
	modprobe -a -d "$root" -S "$release" --show-depends virtio_blk $modules | awk '{ print $2 }' | sort -u | xargs xz -d
	depmod -b "$root" "$release"
	mkdir -p "$initramfs"/{bin,mod,root,proc,sys,dev}
	cp /bin/busybox "$initramfs/bin/busybox"
	install -m 755 "$here/initramfs-init" "$initramfs/init"
	modprobe -d "$root" -S "$release" --show-depends virtio_blk | while read -r _ module _; do
		cp "$module" "$initramfs/mod/"
		basename "$module" >>"$initramfs/mod/order"
	done
	(cd "$initramfs" && find . | cpio --quiet -o -H newc) >"$out/initrd"

	say "making the host's file system from $(du -sm "$root" | cut -f1) MB"
	truncate -s 2G "$out/host.img"
	mkfs.ext4 -q -F -d "$root" -L rig -E lazy_itable_init=0,lazy_journal_init=0,nodiscard "$out/host.img"
	rm -r "$root" "$initramfs"
}

kernel=$(cached debian-kernel "$(debian_kernel_key)" debian_kernel_into)
base=$(cached rig-tree "$(key_of "=$packages" "=$(declare -f tree debian_tree)" "=$(debian_versions $packages)")" tree)
cached rig "$(key_of "=$base $kernel $modules $(version_of busybox-static)" "=$(declare -f image)" "$here/rig-init" "$here/initramfs-init")" image
