# For scripts that fetch a program from Debian where it is not installed: sourced by them. They set
# `program`, `wanted` (what they look for on the PATH), and `fetch`, which downloads packages here by
# `apt`. Nothing is installed, and nobody need be root.
cache=${XDG_CACHE_HOME:-${HOME:?is not set, so nobody knows where to keep what is fetched}/.cache}
cache+=/vllm-sched/$program

fail() {
    printf '%s: %s\n' "$program" "$1; put $wanted on the PATH" >&2
    exit 1
}

lists=() # the machine's own
patience=(-o Acquire::Retries=5 -o Acquire::http::Timeout=30 -o Acquire::https::Timeout=30)
apt() { apt-get -qq -o APT::Sandbox::User= "${patience[@]}" "${lists[@]}" "$@" 2>>apt.log; }

# Leaves the packages' files in ./unpacked, of a folder of its own that is gone at the end.
unpack() {
    for each in apt-get dpkg; do
        command -v $each >/dev/null || fail "not installed, and without $each it can't be fetched"
    done
    mkdir -p "$(dirname "$cache")"
    work=$(mktemp -d "$cache.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    cd "$work"
    if ! fetch; then
        # Those may be missing or old, and belong to root: then some of our own.
        lists=(-o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache")
        mkdir -p lists/partial cache/archives/partial
        apt update >>apt.log || true
        : >apt.log
        fetch || {
            sed "s/^/$program: /" apt.log >&2
            fail "apt has no package of it to give"
        }
    fi
    mkdir unpacked
    for each in *.deb; do dpkg -x "$each" unpacked; done
}

# Puts ./unpacked where the next call finds it, if the program RUNS there.
keep() { # RUNS...
    "unpacked/$1" --version >version 2>&1 || {
        sed "s/^/$program: /" version >&2
        fail "what apt gave does not run here"
    }
    rm -rf "$cache"
    mv unpacked "$cache" 2>/dev/null || [ -x "$cache/$1" ] # somebody else was quicker
}
