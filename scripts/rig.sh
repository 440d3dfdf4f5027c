#!/bin/bash
# Stasis in the emulated production host (rig/README.md), with the hw guest kernel. rig.sh: serve until interrupted.
# rig.sh test: run the end-to-end suite against it from outside.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/lib.sh"
cd "$here/.."
# Tests leave the port of a stasis that the user runs alone.
if [ "${1:-}" = test ]; then listen=127.0.0.1:3090; else listen=${STASIS_LISTEN:-127.0.0.1:3000}; fi
port=${STASIS_RIG_PORT:-${listen##*:}}

assets=$("$here/build.sh" hw)
eval "$assets"
payload=$(mktemp -d)
mkdir "$payload/bin"
cp target/release/stasis "$payload/bin/"
cp "$STASIS_KERNEL" "$payload/vmlinux"
cp --sparse=always "${STASIS_BASES#*=}" "$payload/rootfs.ext4"
# Room for the pools of every sample at once.
serve=(rig/run.sh "$payload" --port "$port:3000" --memory 6144 --
	stasis up --listen 0.0.0.0:3000 --allow-remote --data /data/stasis --kernel vmlinux --base debian=rootfs.ext4 --max-body 12MiB)
trap 'rm -rf "$payload"' EXIT

if [ "${1:-}" != test ]; then
	"${serve[@]}"
	exit
fi

coproc RIG { exec "${serve[@]}" 2>&1; }
rig=$RIG_PID
trap 'kill $rig 2>/dev/null || true; wait $rig 2>/dev/null || true; rm -rf "$payload"' EXIT
exec 7<&"${RIG[0]}"
ready=
while IFS= read -r line <&7; do
	say "rig: $line"
	case $line in *"ready http"*) ready=yes && break ;; esac
done
[ -n "$ready" ] || die "stasis did not come up in the rig"
# Its log goes on to stderr while the tests run.
sed -u 's/^/[rig] /' <&7 >&2 &
STASIS_E2E_URL=http://127.0.0.1:$port STASIS_BIN=$PWD/target/release/stasis cargo test --quiet --locked -p stasis --test e2e
