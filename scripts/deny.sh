#!/bin/bash
# Licences, bans and sources of all dependencies (deny.toml). The advisory database is out of reach of CI.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/lib.sh"
cd "$here/.."
if ! command -v cargo-deny >/dev/null; then
	say "installing cargo-deny (some minutes, once per machine)"
	cargo install --quiet --locked --no-default-features cargo-deny
fi
cargo deny --log-level warn check bans licenses sources
