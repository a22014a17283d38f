# Sourced by scripts that need a program from Debian that is not installed. They set `program`, `wanted`
# (the commands on the PATH) and the function `fetch`, which downloads packages with `apt`. Nothing is
# installed, and root is not needed.
cache=${XDG_CACHE_HOME:-${HOME:?is not set; set it or XDG_CACHE_HOME}/.cache}
cache+=/vllm-sched/$program

fail() {
    printf '%s: %s\n' "$program" "$1; put $wanted on the PATH" >&2
    exit 1
}

lists=() # the machine's package lists
timeouts=(-o Acquire::Retries=5 -o Acquire::http::Timeout=30 -o Acquire::https::Timeout=30)
apt() { apt-get -qq -o APT::Sandbox::User= "${timeouts[@]}" "${lists[@]}" "$@" 2>>apt.log; }

# Unpack the packages into ./unpacked of a temporary folder.
unpack() {
    for command in apt-get dpkg; do
        command -v $command >/dev/null || fail "not installed, and $command, which would fetch it, is missing"
    done
    mkdir -p "$(dirname "$cache")"
    work=$(mktemp -d "$cache.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    cd "$work"
    if ! fetch; then
        # The machine's lists may be missing or old: use new ones.
        lists=(-o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache")
        mkdir -p lists/partial cache/archives/partial
        apt update >>apt.log || true
        : >apt.log
        fetch || {
            sed "s/^/$program: /" apt.log >&2
            fail "apt found no package"
        }
    fi
    mkdir unpacked
    for package in *.deb; do dpkg -x "$package" unpacked; done
}

# Download packages and the libraries that this machine lacks.
download() { # PACKAGE...
    apt --simulate --no-install-recommends install "$@" >plan &&
        sed -n 's/^Inst \([^ ]*\).*/\1/p' plan | grep -v '^xdg-utils$' >names &&
        apt download $(cat names) >>apt.log
}

# Write ./unpacked/run, which runs a program with the unpacked libraries.
write_run() { # PROGRAM
    cat >unpacked/run <<END
#!/usr/bin/env bash
here=\$(dirname "\$(readlink -f "\$0")")
for folder in "\$here"/usr/lib/*-linux-gnu; do
    LD_LIBRARY_PATH=\$folder\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}
done
export LD_LIBRARY_PATH
exec "\$here/$1" "\$@"
END
    chmod +x unpacked/run
}

# Move ./unpacked into the cache if PROGRAM in it runs.
keep() { # PROGRAM [FLAG]: the flag that prints its version
    "unpacked/$1" "${2:---version}" >version 2>&1 || {
        sed "s/^/$program: /" version >&2
        fail "the program from apt does not run here"
    }
    rm -rf "$cache"
    mv unpacked "$cache" 2>/dev/null || [ -x "$cache/$1" ] # another process has moved its own
}
