# shellcheck shell=bash
# Sourced by the image and kernel builders: progress on stderr, and a cache outside the checkout.
#
# A product is a directory $CACHE/<name>/<key>. The key is the first 16 hex digits of a sha256 over everything that
# went into it, so a product is never updated: it is there and right, or it is not there.

me=$(realpath "$0")
me=$(basename "$(dirname "$me")")/$(basename "$me")
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/stasis

# say WHAT...: a line of progress with the time since the script began.
say() {
	printf '[%s %4ds] %s\n' "$me" "$SECONDS" "$*" >&2
}

die() {
	say "error: $*"
	exit 1
}

# key_of PATH|=TEXT...: the key of these inputs. A directory counts with all its files: names, types, modes and contents.
key_of() {
	local input
	for input; do
		case $input in
		=*) printf '%s\n' "$input" ;;
		*)
			# Paths are hashed relative to the input, so that the key does not depend on where the checkout lies.
			if [ -d "$input" ]; then
				(cd "$input" && find . -printf '%P %y %m %l\n' | LC_ALL=C sort &&
					find . -type f -print0 | LC_ALL=C sort -z | xargs -0r sha256sum)
			else
				printf '%s ' "$(basename "$input")" && sha256sum <"$input"
			fi
			;;
		esac
	done | sha256sum | cut -c1-16
}

# version_of PACKAGE: the installed version.
version_of() {
	dpkg-query -W -f '${Version}' "$1" 2>/dev/null || die "package $1 is missing: run scripts/packages.sh"
}

# cached NAME KEY FUNCTION: prints the product's directory, after FUNCTION DIR has filled it if it is not there. FUNCTION
# works in a directory beside the final one, which is renamed when complete: an interrupted build leaves nothing that
# could be taken for a product. One builder at a time; a second one waits and finds the first one's product.
cached() {
	local final=$CACHE/$1/$2 temp
	if [ ! -d "$final" ]; then
		mkdir -p "$CACHE/$1"
		(
			exec 9>"$CACHE/$1/.lock"
			flock -n 9 || { say "$1: waiting for another build" && flock 9; }
			[ -d "$final" ] && exit
			# We hold the lock, so temporary directories are a dead build's.
			rm -rf "$CACHE/$1"/.tmp.*
			temp=$(mktemp -d "$CACHE/$1/.tmp.XXXXXX")
			trap 'rm -rf "$temp"' EXIT
			chmod 755 "$temp"
			"$3" "$temp" >&2 9>&-
			mv -T "$temp" "$final"
		) || die "building $1 failed"
	fi
	printf '%s\n' "$final"
}
