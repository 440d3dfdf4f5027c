#!/bin/bash
# Rules of docs/CONTRIBUTING.md that no other tool checks.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/lib.sh"
cd "$here/.."
failed=0

# Small rooms: no file over 500 lines.
while read -r lines file; do
	[ "$file" = total ] && continue
	if [ "$lines" -gt 500 ]; then
		say "$file has $lines lines: split it"
		failed=1
	fi
done < <(git ls-files '*.rs' | xargs wc -l)

# Only the folders that the design names may hold unsafe code.
while read -r file; do
	case $file in
	vmm/* | guest/agent/* | guest/envd/src/process/child.rs | guest/envd/src/fd.rs | guest/bare/src/bin/*) ;;
	*)
		say "$file: unsafe code belongs in vmm/, guest/agent/, envd's two corners and the bare guest's machine only"
		failed=1
		;;
	esac
done < <(git grep -lE '\bunsafe (\{|fn|impl)' -- '*.rs' || true)

# No machine's paths, no registry's host.
if git grep -nE '(/root/\.|/work/(main|shared)|/home/[a-z]+/\.cargo|deb\.debian\.org|crates\.io/api)' -- ':!scripts/house-rules.sh' ':!*.lock'; then
	say "a path of a machine or a registry's host stands in the repository"
	failed=1
fi
exit $failed
