#!/usr/bin/env bash
# Build .venv for `make demo`, `make test` and `make lint`; return at once if its inputs have not changed.
# UPDATE=1 installs the newest version of every dependency and writes the versions into constraints.txt.
set -euo pipefail
unset CDPATH
cd -P "$(dirname "$0")/.."

venv=.venv stamp=.venv/.setup-stamp
say() { printf 'setup: %s\n' "$*" >&2; }
fail() { say "$*" && exit 1; }
hash_inputs() { { pwd; cat pyproject.toml constraints.txt scripts/setup.sh scripts/cpu-excludes.txt; } | sha256sum; }
is_built() { [ -z "${UPDATE:-}" ] && [ -x $venv/bin/python ] && grep -qsxF "$(hash_inputs)" $stamp; }
is_built && exit 0
if command -v flock >/dev/null; then
    exec 9>>pyproject.toml # two commands at once must not build the same folder
    flock -n 9 || { say "waiting for another command that builds $venv"; flock 9 || true; }
    is_built && exit 0
fi

# /usr/bin first: a version manager's Python is often built without optimisation.
check='import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 15))'
for python in "${PYTHON:-}" /usr/bin/python3.11 python3.{11,12,13,14} python3 ""; do
    [ -n "$python" ] && "$python" -c "$check" &>/dev/null && break
done
[ -n "$python" ] || fail "found no CPython 3.11 to 3.14 with venv; install python3 and python3-venv, or set PYTHON"
"$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null ||
    fail "vLLM's CPU build needs libnuma.so.1; install libnuma1 (Debian, Ubuntu) or numactl-libs (Fedora)"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
say "building $venv with Python $version (3.5 GB; 15 s to 2 min)"
# Without a stamp an installation was interrupted. Scripts in a moved folder contain its old path.
{ [ -x $venv/bin/python ] && grep -qsxF "$PWD $version" $stamp; } || "$python" -m venv --clear $venv
PIP_USER=0 $venv/bin/python -m pip install --quiet --upgrade pip uv ||
    fail "pip could not install uv; check the network or PIP_INDEX_URL"
rm -f $stamp

pip_setting() { # NAME VARIABLE: uv does not read pip's settings
    printf '%s' "${!2:-$($venv/bin/python -m pip config get "global.$1" 2>/dev/null || true)}"
}
index=$(pip_setting index-url PIP_INDEX_URL) extra=$(pip_setting extra-index-url PIP_EXTRA_INDEX_URL)
[ -z "$index" ] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$index}" # PyPI needs no extra index
[ -z "$index" ] || [ -z "$extra" ] ||
    export UV_INDEX="${UV_INDEX:-$extra}" UV_INDEX_STRATEGY="${UV_INDEX_STRATEGY:-unsafe-best-match}"
cert=$(pip_setting cert PIP_CERT)
[ -z "$cert" ] || export SSL_CERT_FILE="${SSL_CERT_FILE:-$cert}"
options=(--constraints constraints.txt) torch=(--torch-backend cpu)
[ -z "${UPDATE:-}" ] || options=(--upgrade)
for place in $(pip_setting find-links PIP_FIND_LINKS); do
    [[ $place == *://* || -e $place ]] || continue # pip ignores a missing folder, uv fails
    options+=(--find-links "$place")
    ! compgen -G "$place/torch-*+cpu-cp${version/./}-*.whl" >/dev/null || torch=() # uv would ignore this wheel
done
inputs=$(hash_inputs)
$venv/bin/uv pip install --quiet --compile-bytecode --python $venv/bin/python "${torch[@]}" "${options[@]}" \
    --excludes scripts/cpu-excludes.txt --editable '.[cpu,plots,redis,postgres]' --group test --group lint ||
    fail "the installation failed; PIP_FIND_LINKS may name a folder with torch's CPU wheel"
if [ -n "${UPDATE:-}" ]; then
    $venv/bin/uv pip freeze --quiet --python $venv/bin/python --exclude-editable | sed 's/+cpu$//' >constraints.txt
    inputs=$(hash_inputs)
fi
printf '%s\n' "$PWD $version" "$inputs" >$stamp
