#!/bin/bash
# Builds the bare guest (guest/bare), prints the path of its image: an ELF that `stasis up --kernel` takes. Beside it lies an empty file system, IMAGE.ext4:
# a template must have a base, though this guest looks at no disk.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/.."
target=x86_64-unknown-linux-gnu
# No C library and no start-up code of one: at the address where the VMM loads kernels.
flags="-C panic=abort -C relocation-model=static -C target-feature=+crt-static -C link-arg=-nostartfiles -C link-arg=-nostdlib -C link-arg=-static"
flags+=" -C link-arg=-Wl,--image-base=0x100000,-z,noexecstack,--build-id=none -C strip=debuginfo"
RUSTFLAGS=$flags cargo build --quiet --release --locked -p stasis-bare --features machine --target $target >&2
image=${CARGO_TARGET_DIR:-$PWD/target}/$target/release/stasis-bare
if [ ! -e "$image.ext4" ]; then
	truncate --size 16M "$image.ext4.new"
	mkfs.ext4 -q "$image.ext4.new"
	mv "$image.ext4.new" "$image.ext4"
fi
echo "$image"
