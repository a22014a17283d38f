"""`make setup` on other machines, with fake Python, pip and uv.

Nothing is installed: the fakes record their arguments and settings.
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
# A longer run hangs.
BOUND_S = 60.0
TOOLS = (
    "bash",
    "dirname",
    "sha256sum",
    "cut",
    "cat",
    "rm",
    "mkdir",
    "cp",
    "ln",
    "sed",
    "grep",
    "flock",
    "find",
)
# A fake Python that creates environments of itself; $LACKS is the missing library.
PYTHON = """#!{bash}
case "$*" in
  *ensurepip*) [[ 3.11,3.12,3.14 == *{version}* ]] ;;
  *CDLL*) [ "${{LACKS:-}}" != numa ] ;;
  *"import pip"*) [[ "$*" == *"'{version}'"* ]] ;;
  *version_info*) echo {version} ;;
  --version) echo Python {version}.0 ;;
  "-m venv --clear .venv")
    echo venv {version} >>"$TOLD"
    rm -rf .venv; mkdir -p .venv/bin .venv/lib; cp "$0" .venv/bin/python
    echo "#!$PWD/.venv/bin/python" >.venv/bin/pip ;;
  "-m pip config get global."*)
    name=CONFIGURED_${{*: -1}}; name=${{name/global./}}; name=${{name//-/_}}
    [ -n "${{!name:-}}" ] && echo "${{!name}}" ;;
  "-m pip install"*)
    [ "${{PIP_USER:-}}" != 1 ] || exit 1
    [ -z "${{OFFLINE:-}}" ] || exit 1
    # Like pip, it handles a Ctrl-C, which its whole group gets.
    if [ "${{CUT_OFF:-}}" = pip ]; then trap "" INT; kill -INT -- -$PPID; exit 1; fi
    ln -sf "$UV" .venv/bin/uv ;;
  *) echo "unexpected: $*" >&2; exit 9 ;;
esac
"""
# It records the settings that TELL names.
UV = """#!{bash}
[ "$*" != "cache dir" ] || {{ echo "$HOME/.cache/uv"; exit; }}
echo "uv ${{UV_DEFAULT_INDEX:-}} $*" >>"$TOLD"
for name in ${{TELL:-}}; do echo "$name=${{!name:-}}" >>"$TOLD"; done
# Write a file with a later timestamp.
until [ -n "${{SOLVES_NOTHING:-}}" ] || [ .venv/lib/part -nt .venv/.setup-begun ]; do
    : >.venv/lib/part
done
[ "${{CUT_OFF:-}}" != uv ] || kill -KILL $$
[ -z "${{GATE:-}}" ] || read -r _ <"$GATE"
exit ${{FAILS:-0}}
"""


class Machine:
    """A clone of the project with its own PATH."""

    def __init__(self, folder: Path) -> None:
        self.clone, self.bin, self._log = folder / "a clone", folder / "bin", folder / "told"
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
        """Add a Python to the PATH."""
        return self._write(
            self.bin / f"python{version}",
            PYTHON.format(bash=shutil.which("bash"), version=version),
        )

    def _write(self, file: Path, text: str) -> Path:
        file.write_text(text)
        file.chmod(0o755)
        return file

    def setup(self, **more: str) -> subprocess.CompletedProcess[str]:
        """Run the setup, with only the tools that it needs."""
        self._log.write_text("")
        started = self.start(**more)
        out, err = started.communicate(timeout=BOUND_S)
        return subprocess.CompletedProcess(started.args, started.returncode, out, err)

    def start(self, **more: str) -> subprocess.Popen[str]:
        """Start the setup."""
        here = {"PATH": self.bin, "HOME": self.clone, "TOLD": self._log, "UV": self._uv}
        # The machine's own Python would precede those on the PATH.
        environment = {"PYTHON": str(next(self.bin.glob("python*"), "")), **more}
        started = subprocess.Popen(
            [self.script],
            cwd=self.clone,
            env=environment | {name: str(value) for name, value in here.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # to kill the whole group
        )
        self._started.append(started)
        return started

    def stop(self) -> None:
        """Kill all started processes."""
        for each in self._started:
            with suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)
            each.communicate()

    def disable_locks(self) -> None:
        """Make flock fail, as on a file system without locks."""
        (self.bin / "flock").unlink()
        self._write(self.bin / "flock", f"#!{shutil.which('bash')}\nexit 71\n")

    @property
    def calls(self) -> Sequence[str]:
        """The recorded calls of the fakes."""
        return self._log.read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.stop()


def test_environment_is_built_once(machine: Machine) -> None:
    machine.python("3.11")
    done = machine.setup()
    assert done.returncode == 0, done.stderr
    assert machine.calls[0] == "venv 3.11"
    assert machine.calls[1].startswith("uv  pip install ")
    assert "--torch-backend cpu" in machine.calls[1]
    again = machine.setup()
    assert (again.returncode, again.stderr, machine.calls) == (0, "", [])


def test_environment_is_rebuilt_for_another_python(machine: Machine) -> None:
    machine.python("3.14")
    failed = machine.setup(FAILS="1")
    assert failed.returncode == 1
    assert "PIP_FIND_LINKS" in failed.stderr
    python = machine.python("3.11")
    assert machine.setup(PYTHON=str(python)).returncode == 0
    assert machine.calls[0] == "venv 3.11"
    # Only the installation is repeated if nothing else is missing.
    (machine.clone / ".venv/.setup-stamp").unlink()
    assert machine.setup(PYTHON=str(python)).returncode == 0
    assert [line.split()[0] for line in machine.calls] == ["uv"]


def test_moved_environment_is_rebuilt(machine: Machine, tmp_path: Path) -> None:
    machine.python("3.11")
    assert machine.setup().returncode == 0
    # Its commands contain the path of the old folder.
    machine.clone = machine.clone.rename(tmp_path / "elsewhere")
    machine.script = str(machine.clone / "scripts/setup.sh")
    assert machine.setup().returncode == 0
    assert machine.calls[0] == "venv 3.11"
    again = machine.setup()
    assert (again.returncode, again.stderr, machine.calls) == (0, "", [])


def test_environment_without_its_python_is_rebuilt(machine: Machine) -> None:
    machine.python("3.11")
    assert machine.setup().returncode == 0
    (machine.clone / ".venv/bin/python").unlink()
    assert machine.setup().returncode == 0
    assert machine.calls[0] == "venv 3.11"


# uv's exit codes with a full disk.
@pytest.mark.parametrize(
    "ended",
    [{"CUT_OFF": "pip"}, {"CUT_OFF": "uv"}, {"FAILS": "1"}, {"FAILS": "2"}, {"FAILS": "101"}],
)
def test_environment_of_a_failed_installation_is_rebuilt(
    machine: Machine, ended: dict[str, str]
) -> None:
    machine.python("3.11")
    assert machine.setup(**ended).returncode != 0
    # A partly installed package would count as installed.
    assert machine.setup().returncode == 0
    assert [line.split()[0] for line in machine.calls] == ["venv", "uv"]
    (machine.clone / ".venv/.setup-stamp").unlink()
    assert machine.setup().returncode == 0
    assert [line.split()[0] for line in machine.calls] == ["uv"]


@pytest.mark.parametrize("ended", [{"OFFLINE": "1"}, {"SOLVES_NOTHING": "1", "FAILS": "1"}])
def test_environment_without_changes_is_kept_after_a_failure(
    machine: Machine, ended: dict[str, str]
) -> None:
    machine.python("3.11")
    assert machine.setup().returncode == 0
    (machine.clone / ".venv/.setup-stamp").unlink()
    for _ in range(2):
        assert machine.setup(**ended).returncode == 1
        assert "venv 3.11" not in machine.calls
    assert machine.setup().returncode == 0
    assert [line.split()[0] for line in machine.calls] == ["uv"]


def test_shell_settings_are_ignored(machine: Machine, tmp_path: Path) -> None:
    machine.python("3.11")
    (other := tmp_path / "other/scripts").mkdir(parents=True)
    shutil.copy(machine.clone / "scripts/setup.sh", other)
    # make uses this relative name, which cd would resolve by CDPATH.
    machine.script = "scripts/setup.sh"
    done = machine.setup(PIP_USER="1", CDPATH=str(other.parent))
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert (machine.clone / ".venv/.setup-stamp").exists()


def test_only_one_of_two_concurrent_setups_builds(machine: Machine, tmp_path: Path) -> None:
    machine.python("3.11")
    os.mkfifo(gate := tmp_path / "gate")
    # Opened for both directions, so that open does not block.
    with os.fdopen(os.open(gate, os.O_RDWR)) as opened:
        first = machine.start(GATE=str(gate))
        until = time.monotonic() + BOUND_S
        while len(machine.calls) < 2:
            assert first.poll() is None
            assert time.monotonic() < until
            time.sleep(0.01)
        second = machine.start()
        assert second.stderr is not None
        assert "waiting" in second.stderr.readline()
        os.write(opened.fileno(), b"\n")
        for process in (first, second):
            process.communicate(timeout=BOUND_S)
            assert process.returncode == 0
    assert [line.split()[0] for line in machine.calls] == ["venv", "uv"]


def test_setup_without_file_locks_warns_and_builds(machine: Machine) -> None:
    machine.python("3.11")
    machine.disable_locks()
    done = machine.setup()
    assert done.returncode == 0, done.stderr
    assert machine.calls[0] == "venv 3.11"
    assert done.stderr.count("locked") == 1
    assert "another command is building" not in done.stderr


def test_setup_without_flock_warns_and_builds(machine: Machine) -> None:
    machine.python("3.11")
    (machine.bin / "flock").unlink()
    done = machine.setup()
    assert done.returncode == 0, done.stderr
    assert machine.calls[0] == "venv 3.11"
    assert done.stderr.count("no flock") == 1
    again = machine.setup()
    assert (again.returncode, again.stderr, machine.calls) == (0, "", [])


def test_missing_library_is_reported_before_any_download(machine: Machine) -> None:
    machine.python("3.11")
    done = machine.setup(LACKS="numa")
    assert done.returncode == 1
    assert "libnuma.so.1" in done.stderr
    assert "apt-get install libnuma1" in done.stderr
    assert machine.calls == []


@pytest.mark.parametrize(
    ("settings", "index"),
    [
        ({}, ""),
        ({"PIP_INDEX_URL": "https://mirror/simple"}, "https://mirror/simple"),
        ({"CONFIGURED_index_url": "https://written/simple"}, "https://written/simple"),
        ({"CONFIGURED_index_url": "https://w/", "PIP_INDEX_URL": "https://said/"}, "https://said/"),
        ({"PIP_INDEX_URL": "https://pip/", "UV_DEFAULT_INDEX": "https://uv/"}, "https://uv/"),
        ({"PIP_INDEX_URL": "https://pip/", "UV_INDEX_URL": "https://uv/"}, "https://uv/"),
    ],
)
def test_uv_uses_pips_index(machine: Machine, settings: dict[str, str], index: str) -> None:
    machine.python("3.11")
    assert machine.setup(**settings).returncode == 0
    assert machine.calls[1].startswith(f"uv {index} pip install")


CPU_INDEX = "--torch-backend cpu"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("{wheels}", "--find-links {wheels}"),
        ("{wheels}/", "--find-links {wheels}/"),
        ("~/wheels", "--find-links {home}/wheels " + CPU_INDEX),
        # Other links are kept.
        (
            "https://a/ {other} {wheels}",
            "--find-links https://a/ --find-links {other} --find-links {wheels}",
        ),
        # No link has a torch wheel for this Python.
        ("https://a/ {other}", "--find-links https://a/ --find-links {other} " + CPU_INDEX),
        # pip ignores missing folders, uv fails on them.
        ("{nowhere} {other}", "--find-links {other} " + CPU_INDEX),
        ("{nowhere}", CPU_INDEX),
        ("{spaced}", "--find-links {spaced}"),
    ],
)
def test_uv_uses_pips_find_links(
    machine: Machine, tmp_path: Path, given: str, expected: str
) -> None:
    machine.python("3.11")
    names = {"wheels": "wheels", "other": "other", "spaced": "of mine"}
    places = {name: tmp_path / folder for name, folder in names.items()}
    for name, folder in places.items():
        folder.mkdir()
        tag = "cp312" if name == "other" else "cp311"
        (folder / f"torch-2.13.0+cpu-{tag}-{tag}-linux_x86_64.whl").touch()
    (machine.clone / "wheels").mkdir()
    places |= {"nowhere": tmp_path / "nowhere", "home": machine.clone}
    assert machine.setup(PIP_FIND_LINKS=given.format_map(places)).returncode == 0
    words = machine.calls[1].partition(".venv/bin/python ")[2].partition(" --excludes")[0]
    assert words == expected.format_map(places)


def test_uv_uses_pips_certificates_and_extra_indexes(machine: Machine) -> None:
    machine.python("3.11")
    names = "UV_INDEX UV_INDEX_STRATEGY SSL_CERT_FILE"
    given = {"TELL": names, "PIP_CERT": "/c.pem", "PIP_EXTRA_INDEX_URL": "https://a/ https://b/"}
    assert machine.setup(**given, PIP_INDEX_URL="https://m/").returncode == 0
    assert machine.calls[2:] == [
        "UV_INDEX=https://a/ https://b/", "UV_INDEX_STRATEGY=unsafe-best-match",
        "SSL_CERT_FILE=/c.pem",
    ]  # fmt: skip
    (machine.clone / ".venv/.setup-stamp").unlink()
    # Not with the public index, and not if uv has its own settings.
    assert machine.setup(**given).returncode == 0
    assert machine.calls[1:3] == ["UV_INDEX=", "UV_INDEX_STRATEGY="]
    (machine.clone / ".venv/.setup-stamp").unlink()
    own = {"PIP_INDEX_URL": "https://m/", "UV_INDEX": "https://u/", "SSL_CERT_FILE": "/own.pem"}
    assert machine.setup(**given, **own).returncode == 0
    assert machine.calls[1:] == [
        "UV_INDEX=https://u/", "UV_INDEX_STRATEGY=", "SSL_CERT_FILE=/own.pem"
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["PIP_NO_INDEX", "CONFIGURED_no_index"])
@pytest.mark.parametrize("enabled", ["1", "true", "TRUE", "YES", "y", "t", "On"])
def test_no_index_setting_uses_only_find_links(machine: Machine, name: str, enabled: str) -> None:
    machine.python("3.11")
    places = {"CONFIGURED_find_links": "/ https://w/"}
    assert machine.setup(**places, **{name: enabled}).returncode == 0
    assert "--find-links / --find-links https://w/ --no-index" in machine.calls[1]
    assert CPU_INDEX not in machine.calls[1]
    (machine.clone / ".venv/.setup-stamp").unlink()
    assert machine.setup(**places, **{name: "false"}).returncode == 0
    assert "--no-index" not in machine.calls[0]
    assert CPU_INDEX in machine.calls[0]


def test_uv_runs_without_cache_if_it_is_unwritable(machine: Machine) -> None:
    machine.python("3.11")
    assert machine.setup(TELL="UV_NO_CACHE").returncode == 0
    assert machine.calls[2:] == ["UV_NO_CACHE="]
    (machine.clone / ".venv/.setup-stamp").unlink()
    shutil.rmtree(machine.clone / ".cache")
    (machine.clone / ".cache").touch()
    assert machine.setup(TELL="UV_NO_CACHE").returncode == 0
    assert machine.calls[1:] == ["UV_NO_CACHE=1"]


def test_versions_are_pinned_except_for_an_update(machine: Machine) -> None:
    machine.python("3.11")
    machine.setup()
    assert "--constraints constraints.txt" in machine.calls[-1]
    done = machine.setup(UPDATE="1")
    assert done.returncode == 0, done.stderr
    upgrade = [line for line in machine.calls if " pip install " in line][-1]
    assert "--upgrade" in upgrade
    assert "--constraints" not in upgrade
    assert " pip freeze " in machine.calls[-1]
