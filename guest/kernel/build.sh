#!/bin/bash
# Builds the guest kernel: build.sh emulated|hw. Prints the path of vmlinux (an ELF that enters by PVH or the 64-bit
# protocol); its .config lies beside it as "config".
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../../scripts/lib.sh"

variant=${1:-}
case $variant in emulated | hw) ;; *) die "usage: build.sh emulated|hw" ;; esac

series=6.12
tarball=/usr/src/linux-source-$series.tar.xz
version=$(version_of linux-source-$series)
fragments=("$here/base.config" "$here/$variant.config")

# Unpacked and patched once, built out of tree: both variants and every change of a .config share it. The patches go
# onto both variants, since one source is what the design promises; each is inert unless its option is set.
unpack() {
	say "unpacking linux-source-$series $version (about 30 s)"
	tar -xf "$tarball" -C "$1" --strip-components=1
	local patch
	for patch in "$here"/patches/*.patch; do
		say "applying $(basename "$patch")"
		patch -d "$1" -p1 --no-backup-if-mismatch --fuzz=0 <"$patch"
	done
}

# Kconfig drops silently what its dependencies forbid, and turns on what something else selects. Both would come out much
# later as a guest that misses something, so every line of the fragments must have arrived; the last one wins.
verify() {
	awk '
		FNR == NR { if ($0 ~ /^CONFIG_/) { split($0, kv, "="); final[kv[1]] = substr($0, length(kv[1]) + 2) } next }
		/^CONFIG_/ { split($0, kv, "="); want[kv[1]] = substr($0, length(kv[1]) + 2) }
		/^# CONFIG_.* is not set$/ { want[$2] = "n" }
		END {
			for (k in want) {
				got = (k in final) ? final[k] : "n"
				if (got != want[k]) { printf "lost: %s is %s, wanted %s\n", k, got, want[k]; bad = 1 }
			}
			exit bad
		}' "$1" "${fragments[@]}" >&2
}

# One line every ten seconds: the compiler's lines are the clock, so nothing polls. How many objects there will be is
# known from the last build of this variant, if there was one.
progress() {
	local line objects=0 next=$((SECONDS + 10)) of=
	[ -f "$CACHE/kernel/.objects-$variant" ] && of=" of about $(cat "$CACHE/kernel/.objects-$variant")"
	while IFS= read -r line; do
		printf '%s\n' "$line" >>"$1"
		case $line in "  CC "* | "  AS "*) objects=$((objects + 1)) ;; esac
		if [ "$SECONDS" -ge "$next" ]; then
			say "compiled $objects$of objects"
			next=$((SECONDS + 10))
		fi
	done
	say "compiled $objects objects"
	echo "$objects" >"$CACHE/kernel/.objects-$variant"
}

build() {
	local out=$1 obj=$1/obj
	mkdir "$obj"
	make -s -C "$source" O="$obj" tinyconfig
	"$source/scripts/kconfig/merge_config.sh" -m -Q -O "$obj" "$obj/.config" "${fragments[@]}" >"$out/merge.log"
	make -s -C "$source" O="$obj" olddefconfig
	verify "$obj/.config" || die "the configuration lost what the fragments ask for (above)"
	say "building vmlinux ($variant), 4 to 10 minutes on two cores"
	# A fixed user, host and time: the same inputs give the same kernel.
	if ! make -C "$source" O="$obj" -j"$(nproc)" KBUILD_BUILD_USER=stasis KBUILD_BUILD_HOST=stasis \
		KBUILD_BUILD_TIMESTAMP='1970-01-01' vmlinux 2>"$out/errors.log" | progress "$out/make.log"; then
		tail -n 30 "$out/errors.log"
		die "make failed"
	fi
	strip --strip-debug -o "$out/vmlinux" "$obj/vmlinux"
	cp "$obj/.config" "$out/config"
	rm -r "$obj" "$out"/*.log
}

source=$(cached kernel-source "$(key_of "=$version" "$here/patches")" unpack)
product=$(cached kernel "$(key_of "=$variant $version $(gcc -dumpfullversion)" "$0" "${fragments[@]}" "$here/patches")" build)
echo "$product/vmlinux"
