#!/usr/bin/env bash
# Prints a program that is a headless Chromium: one on the PATH, or else Debian's package with the
# libraries that are missing here, unpacked into a cache. Nothing is installed, and nobody need be
# root.
set -euo pipefail

say() { printf 'chromium: %s\n' "$*" >&2; }

for each in chromium-headless-shell chromium chromium-browser google-chrome; do
    command -v $each && exit 0
done
cache=${XDG_CACHE_HOME:-$HOME/.cache}/vllm-sched/chromium
if [ -x "$cache/run" ]; then
    printf '%s\n' "$cache/run"
    exit 0
fi
for each in apt-get dpkg; do
    command -v $each >/dev/null || {
        say "not installed, and without $each it can't be fetched; put chromium on the PATH"
        exit 1
    }
done
mkdir -p "$(dirname "$cache")"
work=$(mktemp -d "$cache.XXXXXX")
trap 'rm -rf "$work"' EXIT
cd "$work"
get() { apt-get --quiet --quiet -o APT::Sandbox::User= "$@"; }
fetch() {
    get "$@" --simulate --no-install-recommends install chromium-headless-shell fonts-dejavu-core \
        >plan 2>apt.log && sed -n 's/^Inst \([^ ]*\).*/\1/p' plan | grep -v '^xdg-utils$' >names &&
        get "$@" download $(cat names) >>apt.log 2>&1
}
# The machine's own lists may be missing or old, and belong to root: then some of our own.
own=(-o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache")
if ! fetch; then
    mkdir -p lists/partial cache/archives/partial
    get "${own[@]}" update >update.log 2>&1 || true
    fetch "${own[@]}" || {
        sed 's/^/chromium: /' apt.log >&2
        say "apt has no package chromium-headless-shell to give; put chromium on the PATH"
        exit 1
    }
fi
mkdir unpacked
for each in *.deb; do dpkg -x "$each" unpacked; done
cat >unpacked/fonts.conf <<END
<?xml version="1.0"?>
<fontconfig>
  <dir>/usr/share/fonts</dir>
  <dir prefix="relative">usr/share/fonts</dir>
  <cachedir prefix="xdg">fontconfig</cachedir>
  <alias><family>sans-serif</family><prefer><family>DejaVu Sans</family></prefer></alias>
</fontconfig>
END
cat >unpacked/run <<'END'
#!/usr/bin/env bash
here=$(dirname "$(readlink -f "$0")")
for each in "$here"/usr/lib/*-linux-gnu "$here"/usr/lib/*-linux-gnu/pulseaudio; do
    LD_LIBRARY_PATH=$each${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
done
export LD_LIBRARY_PATH FONTCONFIG_FILE=$here/fonts.conf
exec "$here/usr/lib/chromium/chromium-headless-shell" "$@"
END
chmod +x unpacked/run
unpacked/run --version >version 2>&1 || {
    sed 's/^/chromium: /' version >&2
    say "what apt gave does not run here; put chromium on the PATH"
    exit 1
}
rm -rf "$cache"
mv unpacked "$cache" 2>/dev/null || [ -x "$cache/run" ] # somebody else was quicker
printf '%s\n' "$cache/run"
