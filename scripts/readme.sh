#!/bin/bash
# Runs what the README tells a newcomer to run: `make up` twice, every command of its "Try it" block, `make down`; and looks for what
# is left behind.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/lib.sh"
cd "$here/.."
data=$(mktemp -d)
export STASIS_DATA=$data STASIS_LISTEN=127.0.0.1:${STASIS_README_PORT:-3080}
export STASIS_API=http://$STASIS_LISTEN PATH=$PWD/target/release:$PATH
trap 'make --no-print-directory down >&2; rm -rf "$data"' EXIT
if [ ! -e /dev/kvm ]; then
	say "SKIPPED: no /dev/kvm, so the README's commands were not run (1 skipped)"
	exit 0
fi

make --no-print-directory up
begun=$SECONDS
make --no-print-directory up
say "the second make up took $((SECONDS - begun)) s"
commands=$(sed -n '/<!-- tested -->/,/^```$/p' README.md | sed '1,2d;$d' | sed "s#127.0.0.1:3000#$STASIS_LISTEN#g")
[ -n "$commands" ] || die "the README has no tested block"
while IFS= read -r command; do
	case $command in '' | '#'*) continue ;; esac
	say "\$ $command"
	bash -euo pipefail -c "$command" </dev/null
done <<<"$commands"

make --no-print-directory down
! grep -q "$data" /proc/self/mountinfo || die "a mount is left"
! losetup --list --noheadings --output BACK-FILE | grep -q "$data" || die "a loop device is left"
# A VM's process has an empty environment and no path: what it holds open tells whose it is.
left=$(find /proc/[0-9]*/fd -lname "$data/*" -printf '%h\n' 2>/dev/null | sort -u || true)
[ -z "$left" ] || die "processes are left: $left"
left=$(find /sys/fs/cgroup -type d -name 'stasis-*' 2>/dev/null || true)
[ -z "$left" ] || die "control groups are left: $left"
say "nothing is left behind"
