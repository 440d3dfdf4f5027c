#!/bin/bash
# Runs one command in the emulated host: run.sh PAYLOAD_DIR [--port HOST[:GUEST]]... [--memory MIB] [--data SIZE] -- COMMAND...
#
# PAYLOAD_DIR is copied to /payload (the command's working directory; /payload/bin is in its PATH). Its output appears on
# stdout as it comes, its exit code becomes this script's. 127.0.0.1:HOST leads to the guest's port GUEST (default 3000);
# nothing leads out. A service is ready when the line that it prints then has come: no need to poll. SIGTERM ends the
# machine at once. 125: the rig itself failed, and its console follows on stderr.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../scripts/lib.sh"

usage="usage: run.sh PAYLOAD_DIR [--port HOST[:GUEST]]... [--memory MIB] [--data SIZE] -- COMMAND..."
payload=${1:-} network=user,id=net,restrict=on memory=4096 data=16G
[ -d "$payload" ] || die "$usage"
shift
while [ $# -gt 0 ] && [ "$1" != -- ]; do
	case $1 in
	--port)
		case $2 in *:*) guest=${2#*:} ;; *) guest=3000 ;; esac
		network+=,hostfwd=tcp:127.0.0.1:${2%%:*}-:$guest
		;;
	--memory) memory=$2 ;;
	--data) data=$2 ;;
	*) die "$usage" ;;
	esac
	shift 2
done
shift || true
[ $# -gt 0 ] || die "$usage"

rig=$("$here/build.sh")
work=$(mktemp -d)
qemu='' output=''
finish() {
	# shellcheck disable=SC2086 # none, one or two process ids
	kill $qemu $output 2>/dev/null || true
	wait
	rm -rf "$work"
}
trap finish EXIT
trap 'say "ended by a signal"; exit 143' TERM INT HUP

truncate -s "$data" "$work/data.img"
# The payload, and as much free room again as half of it plus 64 MB.
truncate -s "$(($(du -sm "$payload" | cut -f1) * 3 / 2 + 64))M" "$work/payload.img"
mkfs.ext4 -q -F -d "$payload" -m 0 -O ^has_journal -E nodiscard "$work/payload.img"
{ printf 'exec' && printf ' %q' "$@" && echo; } >"$work/command"
mkfifo "$work/output"
# QEMU makes its chardevs non-blocking, so it must not get our own stdout. We hold the pipe open until QEMU has ended, so
# that cat sees its end then, and not before.
exec 8<>"$work/output"
cat "$work/output" 8>&- &
output=$!

say "starting the emulated host (6 to 15 s to the command)"
disk=format=raw,if=virtio,cache=unsafe
# One CPU, because QEMU forgets to clear its exception number after VMRUN has injected an interrupt: a kick that comes with nothing to
# deliver makes it deliver that interrupt again, interrupts off or not (README.md). A single CPU is kicked for interrupts only.
# The machine does not outlive this script, however that ends.
setpriv --pdeathsig TERM qemu-system-x86_64 -accel tcg,thread=single -cpu max,+svm -m "$memory" -smp 1 \
	-nodefaults -display none -no-reboot \
	-kernel "$rig/vmlinuz" -initrd "$rig/initrd" -append "console=ttyS0 panic=-1 loglevel=5 printk.devkmsg=on" \
	-drive "file=$rig/host.img,snapshot=on,$disk" -drive "file=$work/payload.img,$disk" -drive "file=$work/data.img,$disk" \
	-netdev "$network" -device virtio-net-pci,netdev=net,romfile= \
	-device virtio-serial-pci \
	-chardev "file,id=output,path=$work/output,append=on" -device virtserialport,name=output,chardev=output \
	-chardev "file,id=code,path=$work/code" -device virtserialport,name=code,chardev=code \
	-fw_cfg "name=opt/stasis/command,file=$work/command" \
	-serial "file:$work/console" </dev/null >&2 8>&- &
qemu=$!
# A signal interrupts this wait at once; its trap then ends the script.
wait "$qemu" || true
qemu=''
exec 8>&-
wait "$output" || true
output=''
code=$(cat "$work/code" 2>/dev/null || true)
if [ -z "$code" ]; then
	cat "$work/console" >&2 || true
	say "the rig ended without an exit code"
	exit 125
fi
say "the command ended with $code"
exit "$code"
