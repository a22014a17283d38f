#!/usr/bin/env bash
# Print the folder with `prometheus` and `promtool`: from the PATH, or else Debian's package, unpacked
# into a cache.
set -euo pipefail

if tool=$(command -v promtool) && command -v prometheus >/dev/null; then
    dirname "$tool"
    exit 0
fi
program=prometheus wanted="prometheus and promtool" bin=usr/bin
. "$(dirname "$0")/debian.sh"
fetch() { apt download prometheus >>apt.log; } # it needs no libraries
if ! [ -x "$cache/$bin/prometheus" ] || ! [ -x "$cache/$bin/promtool" ]; then
    unpack
    keep $bin/promtool
fi
printf '%s\n' "$cache/$bin"
