#!/bin/bash
# make up: from nothing to the answer of a function in a restored microVM. Running it again is quick and changes nothing.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/lib.sh"
cd "$here/.."

data=${STASIS_DATA:-.stasis} listen=${STASIS_LISTEN:-127.0.0.1:3000}
text=/usr/share/common-licenses/GPL-3
export STASIS_DATA=$data STASIS_LISTEN=$listen STASIS_API=http://$listen
assets=$("$here/build.sh")
eval "$assets"
stasis=target/release/stasis

if curl -fsS -m 5 "$STASIS_API/healthz" >/dev/null 2>&1; then
	[ -e "$data/stasis.pid" ] || die "something else answers at $listen: choose another address with STASIS_LISTEN"
	say "stasis is running already"
else
	$stasis up --detach
	curl -fsS -m 30 "$STASIS_API/healthz" >/dev/null || die "stasis is up but not healthy: see $data/stasis.log"
fi
for template in wordcount hello-node; do
	$stasis template build "examples/$template"
done

echo
echo "\$ $stasis invoke wordcount -d @$text"
$stasis invoke wordcount -v -d "@$text"
cat <<END

What to try next:
  curl -i --data-binary @$text $STASIS_API/invoke/wordcount/     the same over HTTP, with all headers
  $stasis --api $STASIS_API invoke hello-node            another language
  make down                                              stop it; nothing stays behind
END
