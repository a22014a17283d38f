#!/usr/bin/env bash
# Builds .venv with everything that `make demo`, `make test` and `make lint` need.
# Quick when nothing changed: the stamp holds a hash of what the environment is made from.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
stamp=$venv/.setup-stamp
want=$(cat pyproject.toml scripts/setup.sh scripts/cpu-excludes.txt | sha256sum | cut -d' ' -f1)
[ "$(cat "$stamp" 2>/dev/null)" = "$want" ] && exit 0

say() { printf 'setup: %s\n' "$*" >&2; }

# The CPU build of torch may lie in a folder as a wheel for CPython 3.11 alone: prefer that one. And
# the distribution's build before one of a version manager, which is mostly made without profiling:
# pure Python takes half as long again there.
find_python() {
    local candidate
    for candidate in "${PYTHON:-}" /usr/bin/python3.11 python3.11 "${HOME:-}"/.pyenv/versions/3.11.*/bin/python \
        python3.12 python3.13 python3; do
        [ -n "$candidate" ] || continue
        "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
            >/dev/null 2>&1 && { printf '%s\n' "$candidate"; return; }
    done
    return 1
}

python=$(find_python) || {
    say "no CPython 3.11 or newer with venv was found; install one"
    say "  Debian 12, Ubuntu 24.04 or newer: apt-get install python3 python3-venv;"
    say "  elsewhere: uv python install 3.11, or any other, and point PYTHON at it"
    exit 1
}
say "building $venv with $("$python" --version) (3.5 GB; 15 s to 2 min)"
# One that was cut off while it was made has a Python and no pip.
$venv/bin/python -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear $venv
rm -f "$stamp"
$venv/bin/python -m pip install --quiet --upgrade pip uv || {
    say "pip could not reach a package index; check the network or PIP_INDEX_URL"
    exit 1
}

# uv knows the PyTorch CPU index by name; a folder of wheels, where there is one, comes first.
torch=(--torch-backend cpu)
tag=$($venv/bin/python -c 'import sys; print(f"cp{sys.version_info[0]}{sys.version_info[1]}")')
[ -n "${PIP_FIND_LINKS:-}" ] && compgen -G "${PIP_FIND_LINKS%/}/torch-*+cpu-$tag-*.whl" >/dev/null &&
    torch=(--find-links "$PIP_FIND_LINKS")
install() {
    # Compiled now, once: where Python may not write beside its sources, each engine's three
    # processes would compile vLLM and torch anew.
    $venv/bin/uv pip install --quiet --compile-bytecode --python $venv/bin/python "${torch[@]}" \
        --excludes scripts/cpu-excludes.txt "$@"
}
install --editable '.[cpu,plots]' --group test --group lint || {
    say "the installation failed; what is above says which package, and"
    say "  a folder with torch's CPU wheel can be given as PIP_FIND_LINKS"
    exit 1
}
printf '%s\n' "$want" >"$stamp"
say "done"
