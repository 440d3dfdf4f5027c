#!/bin/bash
# Debian's kernel as a guest's, unmodified: prints a directory with vmlinux, taken out of its vmlinuz, and initrd, which has its modules for
# our devices, mounts the root disk and hands over to the agent.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../../scripts/lib.sh"
. "$here/../../scripts/debian.sh"

modules="virtio_mmio virtio_blk vmw_vsock_virtio_transport virtio_net virtio_rng virtio_balloon"

# vmlinux: the ELF inside a bzImage. Its header tells where the payload is (Documentation/arch/x86/boot.rst: setup_sects, payload_offset,
# payload_length); the payload's last four bytes are the size of what comes of it.
vmlinux() {
	local file sectors offset length
	file=$(mktemp) && cat >"$file"
	sectors=$(od -An -tu1 -j $((0x1f1)) -N 1 "$file")
	read -r offset length < <(od -An -tu4 -j $((0x248)) -N 8 "$file")
	tail -c +$(((sectors + 1) * 512 + offset + 1)) "$file" | head -c $((length - 4)) | zstd -dc
	rm "$file"
}

guest() {
	local tree=$1/tree ramdisk=$1/ramdisk release
	mkdir -p "$tree/lib" "$ramdisk"/{bin,mod,root,dev}
	cp -a "$kernel/modules" "$tree/lib/modules"
	release=$(ls "$tree/lib/modules")
	depmod -b "$tree" "$release"
	# Each after those that it needs; busybox's insmod wants them unpacked.
	# shellcheck disable=SC2086
	modprobe -a -d "$tree" -S "$release" --show-depends $modules | awk '$1 == "insmod" && !seen[$2]++ { print $2 }' | while read -r module; do
		xz -dc "$module" >"$ramdisk/mod/$(basename "$module" .xz)"
		basename "$module" .xz >>"$ramdisk/mod/order"
	done
	cp /bin/busybox "$ramdisk/bin/busybox"
	install -m 755 "$here/debian-init" "$ramdisk/init"
	(cd "$ramdisk" && find . | cpio --quiet -o -H newc) >"$1/initrd"
	vmlinux <"$kernel/vmlinuz" >"$1/vmlinux"
	rm -r "$tree" "$ramdisk"
}

kernel=$(cached debian-kernel "$(debian_kernel_key)" debian_kernel_into)
cached debian-guest "$(key_of "=$kernel $modules $(version_of busybox-static)" "=$(declare -f guest vmlinux)" "$here/debian-init")" guest
