#!/bin/bash
# Builds the guest's root file system: build.sh AGENT_BINARY [SIZE]. Prints the path of rootfs.ext4, a raw sparse image
# of SIZE (default 2G) with the agent as /sbin/stasis-agent.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../../scripts/lib.sh"
. "$here/../../scripts/debian.sh"

agent=${1:-}
size=${2:-${STASIS_ROOTFS_SIZE:-2G}}
[ -f "$agent" ] || die "usage: build.sh AGENT_BINARY [SIZE]"
agent=$(realpath "$agent")
overlay=$here/overlay
[ -d "$overlay" ] || overlay=/dev/null
packages=$(packages_in "$here/packages.txt")

# The slow half, on its own: Debian and what the guest's contract fixes. It changes when a package does.
tree() {
	local root=$1/tree
	# shellcheck disable=SC2086
	debian_tree "$root" $packages
	chroot "$root" useradd --create-home --uid 1000 --user-group --shell /bin/bash user
	echo 'user ALL=(ALL) NOPASSWD: ALL' >"$root/etc/sudoers.d/user"
	chmod 440 "$root/etc/sudoers.d/user"
	install -d -o 1000 -g 1000 "$root/app"
	install -d "$root/run"
	echo stasis >"$root/etc/hostname"
	printf '127.0.0.1 localhost stasis\n::1 localhost stasis\n' >"$root/etc/hosts"
	# One state for all clones would be worse than none: every restored VM gets its own from the host.
	: >"$root/etc/machine-id"
	rm -rf "$root/var/lib/dbus/machine-id" "$root/var/lib/systemd/random-seed" "$root"/etc/ssh/ssh_host_*
	# A guest kernel that is interpreted pays for every page that python would parse and every .pyc it would write: all
	# of the standard library is compiled here, and checked against nothing, so that copying cannot make it stale.
	say "compiling python's library"
	chroot "$root" python3 -m compileall -q -f -j 0 --invalidation-mode unchecked-hash \
		-x 'lib2to3/tests|/test/' /usr/lib/python3.11 /usr/lib/python3
	# Name look-ups by the linker's cache, not by searching.
	chroot "$root" ldconfig
}

image() {
	local root=$1/root image=$1/rootfs.ext4
	cp -a "$base/tree" "$root"
	if [ -d "$overlay" ]; then
		# The checkout's files belong to whoever checked them out; the guest's belong to root.
		cp -a --no-preserve=ownership "$overlay/." "$root/"
		# Hooks in python start with every interpreter: compiled too.
		find "$overlay" -name '*.py' -printf '/%P\n' |
			xargs -r chroot "$root" python3 -m compileall -q -f --invalidation-mode unchecked-hash
	fi
	install -D -m 755 "$agent" "$root/sbin/stasis-agent"
	say "making a file system of $size from $(du -sm "$root" | cut -f1) MB"
	truncate -s "$size" "$image"
	# No metadata checksums: a guest kernel that is interpreted computes each of them in milliseconds, and what they
	# would find is found by the image's own hash. Nothing is left for a lazy thread in the guest to do. A fixed UUID
	# and hash seed, since every clone has the same anyway.
	mkfs.ext4 -q -F -d "$root" -L stasis -m 1 -J size=8 \
		-O '^metadata_csum,^metadata_csum_seed,^orphan_file' \
		-U 5a515000-0000-4000-8000-000000000001 \
		-E hash_seed=5a515000-0000-4000-8000-000000000002,lazy_itable_init=0,lazy_journal_init=0,nodiscard "$image"
	rm -r "$root"
}

base=$(cached rootfs-tree "$(key_of "$here/packages.txt" "=$(declare -f tree debian_tree)" "=$(debian_versions $packages)")" tree)
product=$(cached rootfs "$(key_of "=$base $size" "=$(declare -f image)" "$agent" "$overlay")" image)
echo "$product/rootfs.ext4"
