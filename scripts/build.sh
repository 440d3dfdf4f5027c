#!/bin/bash
# Builds what runs: the binary, the agent, the guest kernel for this host (or the variant named), the root file system.
# build.sh [hw|emulated]: prints shell assignments for STASIS_KERNEL and STASIS_BASES, to be used with eval.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/lib.sh"
cd "$here/.."

target=x86_64-unknown-linux-gnu
variant=${1:-}
if [ -z "$variant" ]; then
	if grep -qwE 'vmx|svm' /proc/cpuinfo; then variant=hw; else variant=emulated; fi
fi

"$here/packages.sh"
say "building the binary (minutes when new, seconds after)"
# Static: half of what a dynamic one's start costs, and every VM has a process of it, is its search for symbols.
cargo rustc --quiet --release --locked -p stasis --bin stasis -- -C target-feature=+crt-static -C link-arg=-Wl,-z,pack-relative-relocs
# Static, since it is PID 1 of a guest with another libc: for a named target, so that build scripts and macros stay dynamic. At a fixed address, since
# relocations are pages to write before its first instruction.
RUSTFLAGS="-C target-feature=+crt-static -C relocation-model=static -C strip=symbols" \
	cargo build --quiet --profile guest --locked -p stasis-agent --target "$target"
kernel=$(guest/kernel/build.sh "$variant")
rootfs=$(guest/rootfs/build.sh "target/$target/guest/stasis-agent")
printf 'export STASIS_KERNEL=%q STASIS_BASES=%q\n' "$kernel" "debian=$rootfs"
