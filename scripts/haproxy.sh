#!/usr/bin/env bash
# Print the path of haproxy: from the PATH, or else Debian's package with the missing libraries,
# unpacked into a cache.
set -euo pipefail

PATH=$PATH:/usr/sbin command -v haproxy && exit 0
program=haproxy wanted=haproxy
. "$(dirname "$0")/debian.sh"
fetch() { download haproxy; }
if ! [ -x "$cache/run" ]; then
    unpack
    write_run usr/sbin/haproxy
    keep run -v
fi
printf '%s\n' "$cache/run"
