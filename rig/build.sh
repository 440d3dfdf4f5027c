#!/bin/bash
# Builds the emulated host: prints a directory with vmlinuz, initrd and host.img for run.sh.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../scripts/lib.sh"
. "$here/../scripts/debian.sh"

kernel=linux-image-6.12-cloud-amd64
# What rig-init loads; all else is loaded on demand, as on any host.
modules="virtio_net qemu_fw_cfg kvm_amd tun loop xfs"
packages=$(packages_in "$here/packages.txt")

# The slow half: packages only. The kernel is unpacked, not installed: an initramfs of its own making is not wanted.
tree() {
	local root=$1/tree package
	# shellcheck disable=SC2086
	debian_tree "$root" $packages
	package=$(apt-cache depends "$kernel" | awk '$1 == "Depends:" { print $2; exit }')
	say "fetching $package"
	mkdir "$1/kernel"
	(cd "$1" && apt-get -q -o APT::Sandbox::User=root download "$package" && dpkg-deb -x "$package"_*.deb kernel && rm "$package"_*.deb)
	mv "$1"/kernel/lib/modules "$root/usr/lib/modules"
	mv "$1"/kernel/boot/vmlinuz-* "$1/vmlinuz"
	rm -r "$1/kernel"
}

image() {
	local out=$1 root=$1/root initramfs=$1/initramfs release module
	cp "$base/vmlinuz" "$out/vmlinuz"
	cp -a "$base/tree" "$root"
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

base=$(cached rig-tree "$(key_of "=$packages $kernel" "=$(declare -f tree debian_tree)" "=$(debian_versions "$kernel" $packages)")" tree)
cached rig "$(key_of "=$base $modules $(version_of busybox-static)" "=$(declare -f image)" "$here/rig-init" "$here/initramfs-init")" image
