#!/bin/bash
# Installs the Debian packages that building and testing Stasis needs. Does nothing, in no time, when all are there.
set -euo pipefail
. "$(cd "$(dirname "$0")" && pwd)/lib.sh"

packages=(
	# build: the C parts of Rust crates; libclang for the bindings that the userfaultfd crate generates; clang for eBPF
	gcc libc6-dev make pkg-config libclang-14-dev clang-14 llvm-14
	# kernel: the guest's source, and what its build asks for
	linux-source-6.12 flex bison bc libelf-dev libssl-dev xz-utils patch
	# images: trees without a container engine, file systems without mounting
	mmdebstrap e2fsprogs xfsprogs util-linux
	# rig: the emulated host
	qemu-system-x86 busybox-static cpio kmod zstd
	# test tools
	curl iproute2 procps
)

# One query for all of them; dpkg-query fails when it does not know one, which is an answer too.
missing=$(comm -23 <(printf '%s\n' "${packages[@]}" | sort) \
	<(dpkg-query -W -f '${db:Status-Status} ${Package}\n' "${packages[@]}" 2>/dev/null | sed -n 's/^installed //p' | sort))
[ -n "$missing" ] || exit 0
# shellcheck disable=SC2086 # one line, one word per package
missing=$(echo $missing)

[ "$(id -u)" = 0 ] || die "run as root: apt-get install --no-install-recommends $missing"
say "installing $missing"
export DEBIAN_FRONTEND=noninteractive
apt-get update -q >&2
# shellcheck disable=SC2086
apt-get install -q -y --no-install-recommends $missing >&2
say "done"
