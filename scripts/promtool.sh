#!/bin/bash
# Prints the path of promtool. Where it is not installed it is taken out of Debian's package alone: that package would start a server.
set -euo pipefail
. "$(cd "$(dirname "$0")" && pwd)/lib.sh"

if installed=$(command -v promtool); then
	printf '%s\n' "$installed"
	exit
fi

candidate() {
	apt-cache policy prometheus | sed -n 's/^ *Candidate: \([^(].*\)/\1/p'
}

unpack() {
	cd "$1"
	apt-get download -q "prometheus=$version"
	dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x --strip-components=3 ./usr/bin/promtool
	rm prometheus_*.deb
}

version=$(candidate)
[ -n "$version" ] || { apt-get update -q >&2 && version=$(candidate); }
[ -n "$version" ] || die "apt knows no package prometheus, which has promtool"
printf '%s/promtool\n' "$(cached promtool "$(key_of "=$version")" unpack)"
