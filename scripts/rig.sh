#!/bin/bash
# Stasis in the emulated production host (rig/README.md), with the hw guest kernel. rig.sh: serve until interrupted.
# rig.sh test: run the end-to-end suite against it from outside. rig.sh test debian: the same with Debian's kernel as the guests', unmodified,
# and those cases in which its drivers and its restores matter. rig.sh suites: run tests of vmm and pool inside it, where control groups,
# SVM and an unmodified host kernel are.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/lib.sh"
cd "$here/.."
# Tests leave the port of a stasis that the user runs alone.
if [ "${1:-}" = test ]; then listen=127.0.0.1:3090; else listen=${STASIS_LISTEN:-127.0.0.1:3000}; fi
port=${STASIS_RIG_PORT:-${listen##*:}}

# Copies into the payload, as programs, the suites that an own kernel with SVM and control groups changes.
suites() {
	local log name
	log=$(mktemp)
	cargo test --locked --no-run -p stasis-vmm -p stasis-pool 2>"$log" || { cat "$log" >&2 && die "the suites do not build"; }
	mkdir "$payload/suites"
	# "  Executable tests/kvm/main.rs (target/debug/deps/kvm-0123456789abcdef)"
	sed -n 's/^ *Executable .*(\(.*\))$/\1/p' "$log" | while read -r program; do
		name=$(basename "$program")
		cp "$program" "$payload/suites/${name%-*}"
	done
	rm "$log"
	cat >"$payload/run-suites" <<-'END'
		#!/bin/bash
		mkdir -p /data/tmp && export TMPDIR=/data/tmp
		failed=
		# One test after the other: there is one processor, and they share the control groups. The longest stay outside.
		suite() {
			echo "== $*"
			"suites/$1" --test-threads 1 "${@:2}" --skip thousand || failed+=" $1"
		}
		suite jail
		suite kvm
		suite stasis_pool cgroup vmm::
		suite stasis_vmm vcpu::
		[ -z "$failed" ] || { echo "failed:$failed" && exit 1; }
		echo "all suites passed"
	END
	chmod +x "$payload/run-suites"
}

payload=$(mktemp -d)
trap 'rm -rf "$payload"' EXIT
if [ "${1:-}" = suites ]; then
	suites
	rig/run.sh "$payload" --memory 4096 -- ./run-suites
	exit
fi

assets=$("$here/build.sh" hw)
eval "$assets"
mkdir "$payload/bin"
cp target/release/stasis "$payload/bin/"
kernel=(--kernel vmlinux)
cases=("") # all
if [ "${2:-}" = debian ]; then
	STASIS_KERNEL=$(guest/kernel/debian.sh)/vmlinux
	cp "$(dirname "$STASIS_KERNEL")/initrd" "$payload/initrd"
	kernel+=(--initrd initrd)
	cases=('VMs share' 'nothing of an invocation' 'two vCPUs')
fi
cp "$STASIS_KERNEL" "$payload/vmlinux"
cp --sparse=always "${STASIS_BASES#*=}" "$payload/rootfs.ext4"
# Room for the pools of every sample at once, and time for VMs of one emulated processor: eight that are claimed at once take it some
# 10 s.
serve=(rig/run.sh "$payload" --port "$port:3000" --memory 6144 --
	stasis up --listen 0.0.0.0:3000 --allow-remote --data /data/stasis "${kernel[@]}" --base debian=rootfs.ext4 --max-body 12MiB
	--claim-budget 60s)

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
export STASIS_E2E_URL=http://127.0.0.1:$port STASIS_BIN=$PWD/target/release/stasis
for case in "${cases[@]}"; do
	cargo test --quiet --locked -p stasis --test e2e -- "$case"
done
