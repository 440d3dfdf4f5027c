#!/bin/bash
# Fuzzes what reads a guest's, a snapshot's or the node's bytes (vmm/fuzz). fuzz.sh [SECONDS [TARGET...]]: so long for each target, 20 for all
# unless told otherwise. What it finds stays in target/fuzz/TARGET/; what it learns is kept there as well, for the next run.
#
# On the stable compiler: LLVM's coverage instrumentation is asked for by flags that it takes; `cargo fuzz` itself wants a nightly one.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/lib.sh"
cd "$here/.."
seconds=${1:-20}
shift || true
[ $# -gt 0 ] || set -- device state request

flags="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4"
flags+=" -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table"
flags+=" -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1"
target=x86_64-unknown-linux-gnu
# For a named target, so that build scripts and macros are not instrumented.
RUSTFLAGS=$flags cargo build --quiet --release --locked --manifest-path vmm/fuzz/Cargo.toml --target $target --target-dir target/fuzz-build

for name; do
	place=target/fuzz/$name
	mkdir -p "$place/corpus"
	say "fuzzing $name for $seconds s"
	log=$place/log
	if ! "target/fuzz-build/$target/release/$name" "$place/corpus" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=1024 \
		-artifact_prefix="$place/" -print_final_stats=1 >"$log" 2>&1; then
		tail -n 40 "$log" >&2
		die "$name: the input that did it is in $place; repeat with target/fuzz-build/$target/release/$name INPUT"
	fi
	say "$name: $(sed -n 's/^stat::number_of_executed_units: *//p' "$log") inputs, $(sed -n 's/.* cov: \([0-9]*\) .*/\1/p' "$log" | tail -n 1) edges, no failure"
done
