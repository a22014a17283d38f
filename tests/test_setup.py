"""`scripts/setup.sh` with fakes of Python, pip and uv.

Nothing is installed: a fake logs its arguments and the settings that it got.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = ("pyproject.toml", "constraints.txt", "scripts/setup.sh", "scripts/cpu-excludes.txt")
TIMEOUT_S = 60.0
TOOLS = ("bash", "dirname", "sha256sum", "cat", "rm", "mkdir", "cp", "ln", "sed", "grep", "flock")
# A Python of one version, which makes environments from itself. It can't import $MISSING.
PYTHON = """#!{bash}
case "$*" in
  *ensurepip*) [[ 3.11,3.12,3.14 == *{version}* ]] ;;
  *CDLL*) [ "${{MISSING:-}}" != numa ] ;;
  *version_info*) echo {version} ;;
  --version) echo Python {version}.0 ;;
  "-m venv --clear .venv")
    echo venv {version} >>"$LOG"
    rm -rf .venv; mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
  "-m pip config get global."*)
    name=CONFIGURED_${{*: -1}}; name=${{name/global./}}; name=${{name//-/_}}
    [ -n "${{!name:-}}" ] && echo "${{!name}}" ;;
  "-m pip install"*)
    [ "${{PIP_USER:-}}" != 1 ] || exit 1
    [ -z "${{OFFLINE:-}}" ] || exit 1
    ln -sf "$UV" .venv/bin/uv ;;
  *) echo "unexpected: $*" >&2; exit 9 ;;
esac
"""
# It logs its arguments and the settings that SHOW names.
UV = """#!{bash}
echo "uv ${{UV_DEFAULT_INDEX:-}} $*" >>"$LOG"
for name in ${{SHOW:-}}; do echo "$name=${{!name:-}}" >>"$LOG"; done
[ -z "${{KILLED:-}}" ] || kill -KILL $$
[ -z "${{GATE:-}}" ] || read -r _ <"$GATE"
exit ${{FAILS:-0}}
"""


class Machine:
    """A clone of the project, and a PATH of its own."""

    def __init__(self, folder: Path) -> None:
        self.clone, self.bin, self._log = folder / "a clone", folder / "bin", folder / "log"
        self._uv = folder / "uv"
        self.script = str(self.clone / "scripts/setup.sh")
        self._started: list[subprocess.Popen[str]] = []
        self.bin.mkdir()
        self._log.touch()
        for name in TOOLS:
            (self.bin / name).symlink_to(str(shutil.which(name)))
        self._write(self._uv, UV.format(bash=shutil.which("bash")))
        for name in FILES:
            there = self.clone / name
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, there)

    def python(self, version: str) -> Path:
        """Put a Python on the PATH."""
        return self._write(
            self.bin / f"python{version}", PYTHON.format(bash=shutil.which("bash"), version=version)
        )

    def _write(self, file: Path, text: str) -> Path:
        file.write_text(text)
        file.chmod(0o755)
        return file

    def setup(self, **more: str) -> subprocess.CompletedProcess[str]:
        """Run the script with only the tools that it needs, and wait for its end."""
        self._log.write_text("")
        started = self.start(**more)
        out, err = started.communicate(timeout=TIMEOUT_S)
        return subprocess.CompletedProcess(started.args, started.returncode, out, err)

    def start(self, **more: str) -> subprocess.Popen[str]:
        """Start the script."""
        here = {"PATH": self.bin, "HOME": self.clone, "LOG": self._log, "UV": self._uv}
        # Otherwise this machine's /usr/bin/python3.11 would come first.
        environment = {"PYTHON": str(next(self.bin.glob("python*"), "")), **more}
        started = subprocess.Popen(
            [self.script],
            cwd=self.clone,
            env=environment | {name: str(value) for name, value in here.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._started.append(started)
        return started

    def stop(self) -> None:
        """Kill every script that still runs."""
        for each in self._started:
            with suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)
            each.communicate()

    def disable_locks(self) -> None:
        """Have flock fail as on a file system without locks."""
        (self.bin / "flock").unlink()
        self._write(self.bin / "flock", f"#!{shutil.which('bash')}\nexit 71\n")

    def change_inputs(self) -> None:
        with (self.clone / "constraints.txt").open("a") as file:
            file.write("# changed\n")

    @property
    def calls(self) -> Sequence[str]:
        """The calls of the fakes."""
        return self._log.read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.stop()


def assert_built_once(machine: Machine) -> None:
    """Check that the environment is built, and that a second run does nothing."""
    done = machine.setup()
    assert done.returncode == 0, done.stderr
    assert machine.calls[0] == "venv 3.11"
    again = machine.setup()
    assert (again.returncode, again.stderr, machine.calls) == (0, "", [])


def test_it_is_built_once_and_anew_if_it_moved_or_lost_its_python(
    machine: Machine, tmp_path: Path
) -> None:
    machine.python("3.11")
    assert_built_once(machine)
    (machine.clone / ".venv/bin/python").unlink()
    assert_built_once(machine)
    # Its scripts contain the path of the old folder.
    machine.clone = machine.clone.rename(tmp_path / "elsewhere")
    machine.script = str(machine.clone / "scripts/setup.sh")
    assert_built_once(machine)


@pytest.mark.parametrize("has_flock", [True, False])
def test_without_locks_it_builds(machine: Machine, has_flock: bool) -> None:
    machine.python("3.11")
    machine.disable_locks()
    if not has_flock:
        (machine.bin / "flock").unlink()
    assert_built_once(machine)


def test_a_failed_environment_is_built_anew_with_another_python(machine: Machine) -> None:
    machine.python("3.14")
    failed = machine.setup(FAILS="1")
    assert failed.returncode == 1
    assert "PIP_FIND_LINKS" in failed.stderr
    python = machine.python("3.11")
    assert machine.setup(PYTHON=str(python)).returncode == 0
    assert machine.calls[0] == "venv 3.11"
    machine.change_inputs()
    assert machine.setup(PYTHON=str(python)).returncode == 0
    assert [line.split()[0] for line in machine.calls] == ["uv"]


@pytest.mark.parametrize("end", [{"KILLED": "1"}, {"FAILS": "1"}, {"FAILS": "101"}])
def test_an_interrupted_installation_is_built_anew(machine: Machine, end: dict[str, str]) -> None:
    machine.python("3.11")
    assert machine.setup(**end).returncode != 0
    # uv would take a package with half of its files for installed.
    assert machine.setup().returncode == 0
    assert [line.split()[0] for line in machine.calls] == ["venv", "uv"]
    machine.change_inputs()
    assert machine.setup().returncode == 0
    assert [line.split()[0] for line in machine.calls] == ["uv"]


def test_without_a_network_the_environment_is_kept(machine: Machine) -> None:
    machine.python("3.11")
    assert machine.setup().returncode == 0
    machine.change_inputs()
    for _ in range(2):
        assert machine.setup(OFFLINE="1").returncode == 1
        assert machine.calls == []
    assert machine.setup().returncode == 0
    assert [line.split()[0] for line in machine.calls] == ["uv"]


def test_settings_of_the_users_shell_change_nothing(machine: Machine, tmp_path: Path) -> None:
    machine.python("3.11")
    (other := tmp_path / "other/scripts").mkdir(parents=True)
    shutil.copy(machine.clone / "scripts/setup.sh", other)
    # make uses this relative path, for which cd would search CDPATH.
    machine.script = "scripts/setup.sh"
    done = machine.setup(PIP_USER="1", CDPATH=str(other.parent))
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert (machine.clone / ".venv/.setup-stamp").exists()


def test_of_two_at_once_one_builds(machine: Machine, tmp_path: Path) -> None:
    machine.python("3.11")
    os.mkfifo(gate := tmp_path / "gate")
    # Open both ends: opening one end would block.
    with os.fdopen(os.open(gate, os.O_RDWR)) as opened:
        first = machine.start(GATE=str(gate))
        until = time.monotonic() + TIMEOUT_S
        while len(machine.calls) < 2:
            assert first.poll() is None
            assert time.monotonic() < until
            time.sleep(0.01)
        second = machine.start()
        assert second.stderr is not None
        assert "waiting" in second.stderr.readline()
        os.write(opened.fileno(), b"\n")
        for each in (first, second):
            each.communicate(timeout=TIMEOUT_S)
            assert each.returncode == 0
    assert [line.split()[0] for line in machine.calls] == ["venv", "uv"]


def test_a_library_that_is_missing_is_named_before_anything_is_fetched(machine: Machine) -> None:
    machine.python("3.11")
    done = machine.setup(MISSING="numa")
    assert done.returncode == 1
    assert "libnuma.so.1" in done.stderr
    assert "libnuma1" in done.stderr
    assert machine.calls == []


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        ({}, ""),
        ({"PIP_INDEX_URL": "https://mirror/simple"}, "https://mirror/simple"),
        ({"CONFIGURED_index_url": "https://written/simple"}, "https://written/simple"),
        ({"CONFIGURED_index_url": "https://w/", "PIP_INDEX_URL": "https://said/"}, "https://said/"),
        ({"PIP_INDEX_URL": "https://pip/", "UV_DEFAULT_INDEX": "https://uv/"}, "https://uv/"),
    ],
)
def test_pips_index_is_uvs_too(machine: Machine, settings: dict[str, str], asked: str) -> None:
    machine.python("3.11")
    assert machine.setup(**settings).returncode == 0
    assert machine.calls[1].startswith(f"uv {asked} pip install")


CPU_INDEX = "--torch-backend cpu"


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("{wheels}", "--find-links {wheels}"),
        ("{wheels}/", "--find-links {wheels}/"),
        (
            "https://a/ {other} {wheels}",
            "--find-links https://a/ --find-links {other} --find-links {wheels}",
        ),
        # `other` has torch for another Python.
        ("https://a/ {other}", CPU_INDEX + " --find-links https://a/ --find-links {other}"),
        # pip ignores a missing folder, uv fails.
        ("{nowhere} {other}", CPU_INDEX + " --find-links {other}"),
        ("{nowhere}", CPU_INDEX),
    ],
)
def test_uv_gets_pips_folders_and_a_local_torch_comes_first(
    machine: Machine, tmp_path: Path, given: str, asked: str
) -> None:
    machine.python("3.11")
    places = {name: tmp_path / name for name in ("wheels", "other")}
    for name, folder in places.items():
        folder.mkdir()
        tag = "cp312" if name == "other" else "cp311"
        (folder / f"torch-2.13.0+cpu-{tag}-{tag}-linux_x86_64.whl").touch()
    places |= {"nowhere": tmp_path / "nowhere"}
    assert machine.setup(PIP_FIND_LINKS=given.format_map(places)).returncode == 0
    words = machine.calls[1].partition(".venv/bin/python ")[2].partition(" --excludes")[0]
    words = words.replace("--constraints constraints.txt", "").strip()
    assert " ".join(words.split()) == asked.format_map(places)


def test_uv_gets_pips_certificates_and_extra_indexes(machine: Machine) -> None:
    machine.python("3.11")
    names = "UV_INDEX UV_INDEX_STRATEGY SSL_CERT_FILE"
    given = {"SHOW": names, "PIP_CERT": "/c.pem", "PIP_EXTRA_INDEX_URL": "https://a/ https://b/"}
    assert machine.setup(**given, PIP_INDEX_URL="https://m/").returncode == 0
    assert machine.calls[2:] == [
        "UV_INDEX=https://a/ https://b/", "UV_INDEX_STRATEGY=unsafe-best-match",
        "SSL_CERT_FILE=/c.pem",
    ]  # fmt: skip
    machine.change_inputs()
    # Beside PyPI no other index is used, and uv's own settings have precedence.
    assert machine.setup(**given).returncode == 0
    assert machine.calls[1:3] == ["UV_INDEX=", "UV_INDEX_STRATEGY="]
    machine.change_inputs()
    own = {"PIP_INDEX_URL": "https://m/", "UV_INDEX": "https://u/", "SSL_CERT_FILE": "/own.pem"}
    assert machine.setup(**given, **own).returncode == 0
    assert machine.calls[1:] == [
        "UV_INDEX=https://u/", "UV_INDEX_STRATEGY=unsafe-best-match", "SSL_CERT_FILE=/own.pem",
    ]  # fmt: skip


def test_versions_are_pinned_unless_they_are_renewed(machine: Machine) -> None:
    machine.python("3.11")
    machine.setup()
    assert machine.calls[1].startswith("uv  pip install ")
    assert "--torch-backend cpu" in machine.calls[1]
    assert "--constraints constraints.txt" in machine.calls[-1]
    done = machine.setup(UPDATE="1")
    assert done.returncode == 0, done.stderr
    upgrade = [line for line in machine.calls if " pip install " in line][-1]
    assert "--upgrade" in upgrade
    assert "--constraints" not in upgrade
    assert " pip freeze " in machine.calls[-1]
