#!/usr/bin/env bash
# Print the path of redis-server: from the PATH, or else Debian's package with the missing libraries,
# unpacked into a cache.
set -euo pipefail

PATH=$PATH:/usr/sbin command -v redis-server && exit 0
program=redis wanted=redis-server
. "$(dirname "$0")/debian.sh"
fetch() { download redis-server; }
if ! [ -x "$cache/run" ]; then
    unpack
    write_run usr/bin/redis-server
    keep run
fi
printf '%s\n' "$cache/run"
