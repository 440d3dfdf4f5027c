#!/bin/bash
# make bench: measures a server of its own, and writes target/bench/report.json.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/lib.sh"
cd "$here/.."
unset STASIS_API
assets=$("$here/build.sh")
eval "$assets"
bare=$("$here/bare.sh")
stasis=target/release/stasis
data=$(mktemp -d)
export STASIS_DATA=$data STASIS_LISTEN=127.0.0.1:${STASIS_BENCH_PORT:-3070}
# With all devices that a template can have.
function=$data/wordcount
cp -r examples/wordcount "$function"
printf '[devices]\nrng = true\nballoon = true\n' >>"$function/template.toml"
trap '$stasis down --kill >&2; rm -rf "$data"' EXIT
# Where guest kernels are interpreted, 64 requests to one sandbox connect one after the other, for longer than the usual budget.
$stasis up --detach --disk 20GiB --claim-budget 60s
export STASIS_API=http://$STASIS_LISTEN
for template in "$function" examples/hello-node; do
	$stasis template build "$template"
done
mkdir -p target/bench
$stasis bench api --json target/bench/report.json
$stasis bench vmm --template "$data"/data/templates/wordcount/* --json target/bench/report.json
$stasis bench store --dir "$data" --json target/bench/report.json
# The bare guest's server, which runs in the measuring process, comes when no other runs beside it.
$stasis down
export STASIS_DATA=$data/bare STASIS_KERNEL=$bare STASIS_BASES=bare=$bare.ext4
$stasis up --detach --disk 6GiB
$stasis template build loadtest/bare
$stasis down
$stasis bench invoke --template bare --json target/bench/report.json
