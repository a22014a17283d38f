#!/usr/bin/env bash
# Print the folder with PostgreSQL's `initdb` and `postgres`: from the PATH or Debian's place, or else
# Debian's package with the missing libraries, unpacked into a cache.
set -euo pipefail

for folder in $(dirname "$(command -v initdb || echo -)") $(printf '%s\n' /usr/lib/postgresql/*/bin | sort -rV); do
    if [ -x "$folder/initdb" ] && [ -x "$folder/postgres" ]; then
        printf '%s\n' "$folder"
        exit 0
    fi
done
program=postgres wanted="initdb and postgres"
# The server does not run as root, and other users cannot read root's home.
if [ "$(id -u)" = 0 ]; then : "${XDG_CACHE_HOME:=/var/cache}"; fi
. "$(dirname "$0")/debian.sh"
fetch() {
    apt --simulate --no-install-recommends install postgresql >plan &&
        sed -n 's/^Inst \([^ ]*\).*/\1/p' plan | grep -E '^(postgresql-[0-9]|lib)' | grep -v '^libc[6-]' >names &&
        apt download $(cat names) >>apt.log
}
if ! [ -x "$cache/run/initdb" ]; then
    unpack
    mkdir unpacked/run
    for name in initdb postgres; do
        cat >unpacked/run/$name <<'END'
#!/usr/bin/env bash
here=$(dirname "$(dirname "$(readlink -f "$0")")")
for folder in "$here"/usr/lib/*-linux-gnu; do
    LD_LIBRARY_PATH=$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
done
export LD_LIBRARY_PATH
exec "$here"/usr/lib/postgresql/*/bin/"$(basename "$0")" "$@"
END
    done
    chmod +x unpacked/run/*
    chmod go+rx unpacked "$work"
    keep run/initdb
fi
printf '%s\n' "$cache/run"
