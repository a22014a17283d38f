#!/usr/bin/env bash
# Prints the folder that `prometheus` and `promtool` are in: those on the PATH, or else Debian's
# package, unpacked into a cache. Nothing is installed, and nobody need be root.
set -euo pipefail

say() { printf 'prometheus: %s\n' "$*" >&2; }

if tool=$(command -v promtool) && command -v prometheus >/dev/null; then
    dirname "$tool"
    exit 0
fi
cache=${XDG_CACHE_HOME:-$HOME/.cache}/vllm-sched/prometheus
bin=$cache/usr/bin
if [ -x "$bin/prometheus" ] && [ -x "$bin/promtool" ]; then
    printf '%s\n' "$bin"
    exit 0
fi
for each in apt-get dpkg; do
    command -v $each >/dev/null || {
        say "not installed, and without $each it can't be fetched; put prometheus and promtool on the PATH"
        exit 1
    }
done
mkdir -p "$(dirname "$cache")"
work=$(mktemp -d "$cache.XXXXXX")
trap 'rm -rf "$work"' EXIT
cd "$work"
fetch() { apt-get --quiet --quiet -o APT::Sandbox::User= "$@" download prometheus >apt.log 2>&1; }
# The machine's own lists may be missing or old, and belong to root: then some of our own.
own=(-o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache")
if ! fetch; then
    mkdir -p lists/partial cache/archives/partial
    apt-get --quiet --quiet -o APT::Sandbox::User= "${own[@]}" update >update.log 2>&1 || true
    fetch "${own[@]}" || {
        sed 's/^/prometheus: /' apt.log >&2
        say "apt has no package prometheus to give; put prometheus and promtool on the PATH"
        exit 1
    }
fi
dpkg -x prometheus_*.deb unpacked
"unpacked/usr/bin/promtool" --version >/dev/null 2>&1 || {
    say "what apt gave does not run here; put prometheus and promtool on the PATH"
    exit 1
}
rm -rf "$cache"
mv unpacked "$cache" 2>/dev/null || [ -x "$bin/prometheus" ]  # somebody else was quicker
printf '%s\n' "$bin"
