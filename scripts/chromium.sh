#!/usr/bin/env bash
# Print the path of a headless Chromium: from the PATH, or else Debian's package with the missing
# libraries, unpacked into a cache.
set -euo pipefail

for name in chromium-headless-shell chromium chromium-browser google-chrome; do
    command -v $name && exit 0
done
program=chromium wanted=chromium
. "$(dirname "$0")/debian.sh"
fetch() { download chromium-headless-shell fonts-dejavu-core; }
if ! [ -x "$cache/run" ]; then
    unpack
    cat >unpacked/fonts.conf <<'END'
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
for folder in "$here"/usr/lib/*-linux-gnu "$here"/usr/lib/*-linux-gnu/pulseaudio; do
    LD_LIBRARY_PATH=$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
done
export LD_LIBRARY_PATH FONTCONFIG_FILE=$here/fonts.conf
exec "$here/usr/lib/chromium/chromium-headless-shell" "$@"
END
    chmod +x unpacked/run
    keep run
fi
printf '%s\n' "$cache/run"
