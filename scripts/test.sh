#!/bin/bash
# make test: everything that CI runs. test.sh [style|unit|fuzz|direct|rig|readme]...: only these parts.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/lib.sh"
cd "$here/.."
export CARGO_TERM_COLOR=${CARGO_TERM_COLOR:-never} CARGO_TERM_PROGRESS_WHEN=never
# A stasis that the user runs is left alone: tests have data directories and ports of their own.
unset STASIS_DATA STASIS_LISTEN STASIS_API

style() {
	cargo fmt --all --check
	cargo clippy --quiet --locked --workspace --all-targets -- -D warnings
	# The bare guest's machine has no standard library, so no other package may be checked with it.
	RUSTFLAGS="-C panic=abort" cargo clippy --quiet --locked -p stasis-bare --features machine --lib --bins --target x86_64-unknown-linux-gnu -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --quiet --locked --workspace --no-deps --document-private-items
	"$here/deny.sh"
	"$here/house-rules.sh"
}

unit() {
	if ! cargo nextest --version >/dev/null 2>&1; then
		say "installing cargo-nextest (some minutes, once per machine)"
		cargo install --quiet --locked cargo-nextest
	fi
	# The end-to-end suite needs a server and is a part of its own.
	cargo nextest run --locked --workspace -E 'not binary(e2e)' --success-output final 2>&1 | tell_skips
}

# Passes a run's report on. Of what the passed tests printed, which follows the summary, only what this host could not show; and their number.
tell_skips() {
	awk '
		!after { print }
		/^ +Summary / { after = 1; next }
		after && /^ +(PASS|SLOW) / { test = $NF }
		after && /SKIPPED: / { skipped++; sub(/^ */, ""); print "     " test " " $0 }
		after && (/^ +(FAIL|SIG|ABORT|TIMEOUT)/ || /^error/) { print }
		END { print "     " skipped + 0 " skipped because this host lacks something" }'
}

# A smoke run: long enough to find what is easy to find.
fuzz() {
	limited 30m "$here/fuzz.sh" 10
}

direct() {
	local assets bare
	assets=$("$here/build.sh")
	eval "$assets"
	bare=$("$here/bare.sh")
	STASIS_BARE=$bare STASIS_BIN=$PWD/target/release/stasis limited 40m cargo test --quiet --locked -p stasis --test e2e
}

# limited TIME COMMAND...: ends a command that hangs, with all that it started, so that the run ends and says where.
limited() {
	timeout --kill-after 30s --signal TERM "$@" || {
		local code=$?
		[ $code != 124 ] || say "error: not done within $1: ${*:2}"
		return $code
	}
}

rig() {
	limited 40m "$here/rig.sh" test
	limited 20m "$here/rig.sh" test debian
}

readme() {
	"$here/readme.sh"
}

"$here/packages.sh"
# For the case that has a scrape checked; without it that is skipped, and said.
STASIS_PROMTOOL=$("$here/promtool.sh") && export STASIS_PROMTOOL || say "no promtool: scrapes are not checked by it"
[ $# -gt 0 ] || set -- style unit fuzz direct rig readme
summary=''
for part; do
	begun=$SECONDS
	say "== $part"
	"$part"
	summary+=$(printf '  %-8s %4d s' "$part" $((SECONDS - begun)))$'\n'
done
say "all passed:"
printf '%s' "$summary"
