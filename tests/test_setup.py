"""What `make setup` does on machines that are not this one, with stand-ins for Python, pip and uv.

Nothing is installed: a stand-in tells what it was asked for, and under which settings.
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
# What takes longer than this hangs.
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
# A Python of one version, which makes environments of itself; $LACKS is what it can't import.
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
    # As pip does, it answers a Ctrl-C, which its whole group gets.
    if [ "${{CUT_OFF:-}}" = pip ]; then trap "" INT; kill -INT -- -$PPID; exit 1; fi
    ln -sf "$UV" .venv/bin/uv ;;
  *) echo "unexpected: $*" >&2; exit 9 ;;
esac
"""
# It does not tell which settings it has but those that TELL names.
UV = """#!{bash}
[ "$*" != "cache dir" ] || {{ echo "$HOME/.cache/uv"; exit; }}
echo "uv ${{UV_DEFAULT_INDEX:-}} $*" >>"$TOLD"
for name in ${{TELL:-}}; do echo "$name=${{!name:-}}" >>"$TOLD"; done
# Some of the files, at a moment that is seen to be later.
until [ -n "${{SOLVES_NOTHING:-}}" ] || [ .venv/lib/part -nt .venv/.setup-begun ]; do
    : >.venv/lib/part
done
[ "${{CUT_OFF:-}}" != uv ] || kill -KILL $$
[ -z "${{GATE:-}}" ] || read -r _ <"$GATE"
exit ${{FAILS:-0}}
"""


class Machine:
    """A clone of the project, and a PATH of its own."""

    def __init__(self, folder: Path) -> None:
        self.clone, self.bin, self._told = folder / "a clone", folder / "bin", folder / "told"
        self._uv = folder / "uv"
        self.script = str(self.clone / "scripts/setup.sh")
        self._started: list[subprocess.Popen[str]] = []
        self.bin.mkdir()
        self._told.touch()
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
            self.bin / f"python{version}",
            PYTHON.format(bash=shutil.which("bash"), version=version),
        )

    def _write(self, file: Path, text: str) -> Path:
        file.write_text(text)
        file.chmod(0o755)
        return file

    def setup(self, **more: str) -> subprocess.CompletedProcess[str]:
        """Run it, with nothing of this machine's but the tools that it needs."""
        self._told.write_text("")
        started = self.start(**more)
        out, err = started.communicate(timeout=BOUND_S)
        return subprocess.CompletedProcess(started.args, started.returncode, out, err)

    def start(self, **more: str) -> subprocess.Popen[str]:
        """Run it beside others."""
        here = {"PATH": self.bin, "HOME": self.clone, "TOLD": self._told, "UV": self._uv}
        # A Python of this machine's own would come before those on the PATH.
        environment = {"PYTHON": str(next(self.bin.glob("python*"), "")), **more}
        started = subprocess.Popen(
            [self.script],
            cwd=self.clone,
            env=environment | {name: str(value) for name, value in here.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # which ends as one
        )
        self._started.append(started)
        return started

    def stop(self) -> None:
        """Leave nothing running, nor open."""
        for each in self._started:
            with suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)
            each.communicate()

    def has_no_locks(self) -> None:
        """Have flock answer as where the file system knows no locks."""
        (self.bin / "flock").unlink()
        self._write(self.bin / "flock", f"#!{shutil.which('bash')}\nexit 71\n")

    @property
    def told(self) -> Sequence[str]:
        """What the stand-ins were asked for."""
        return self._told.read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.stop()


def test_it_is_built_once(machine: Machine) -> None:
    machine.python("3.11")
    done = machine.setup()
    assert done.returncode == 0, done.stderr
    assert machine.told[0] == "venv 3.11"
    assert machine.told[1].startswith("uv  pip install ")
    assert "--torch-backend cpu" in machine.told[1]
    again = machine.setup()
    assert (again.returncode, again.stderr, machine.told) == (0, "", [])


def test_what_failed_with_one_python_is_built_anew_with_the_next(machine: Machine) -> None:
    machine.python("3.14")
    failed = machine.setup(FAILS="1")
    assert failed.returncode == 1
    assert "PIP_FIND_LINKS" in failed.stderr
    python = machine.python("3.11")
    assert machine.setup(PYTHON=str(python)).returncode == 0
    assert machine.told[0] == "venv 3.11"
    # And where nothing but the installation was amiss, that alone is done again.
    (machine.clone / ".venv/.setup-stamp").unlink()
    assert machine.setup(PYTHON=str(python)).returncode == 0
    assert [line.split()[0] for line in machine.told] == ["uv"]


def test_one_that_was_moved_with_its_folder_is_built_anew(machine: Machine, tmp_path: Path) -> None:
    machine.python("3.11")
    assert machine.setup().returncode == 0
    # Its commands would run what lies, or lay, in the folder where it was made.
    machine.clone = machine.clone.rename(tmp_path / "elsewhere")
    machine.script = str(machine.clone / "scripts/setup.sh")
    assert machine.setup().returncode == 0
    assert machine.told[0] == "venv 3.11"
    again = machine.setup()
    assert (again.returncode, again.stderr, machine.told) == (0, "", [])


def test_one_whose_python_is_gone_is_built_anew(machine: Machine) -> None:
    machine.python("3.11")
    assert machine.setup().returncode == 0
    (machine.clone / ".venv/bin/python").unlink()
    assert machine.setup().returncode == 0
    assert machine.told[0] == "venv 3.11"


# uv ends so with a full disk, by how far it is.
@pytest.mark.parametrize(
    "ended",
    [{"CUT_OFF": "pip"}, {"CUT_OFF": "uv"}, {"FAILS": "1"}, {"FAILS": "2"}, {"FAILS": "101"}],
)
def test_one_that_did_not_end_well_is_built_anew(machine: Machine, ended: dict[str, str]) -> None:
    machine.python("3.11")
    assert machine.setup(**ended).returncode != 0
    # Of what was installed then half the files may be there, and it is taken for whole.
    assert machine.setup().returncode == 0
    assert [line.split()[0] for line in machine.told] == ["venv", "uv"]
    (machine.clone / ".venv/.setup-stamp").unlink()
    assert machine.setup().returncode == 0
    assert [line.split()[0] for line in machine.told] == ["uv"]


@pytest.mark.parametrize("ended", [{"OFFLINE": "1"}, {"SOLVES_NOTHING": "1", "FAILS": "1"}])
def test_one_to_which_nothing_was_written_is_kept(machine: Machine, ended: dict[str, str]) -> None:
    machine.python("3.11")
    assert machine.setup().returncode == 0
    (machine.clone / ".venv/.setup-stamp").unlink()
    for _ in range(2):
        assert machine.setup(**ended).returncode == 1
        assert "venv 3.11" not in machine.told
    assert machine.setup().returncode == 0
    assert [line.split()[0] for line in machine.told] == ["uv"]


def test_settings_of_the_users_shell_change_nothing(machine: Machine, tmp_path: Path) -> None:
    machine.python("3.11")
    (other := tmp_path / "other/scripts").mkdir(parents=True)
    shutil.copy(machine.clone / "scripts/setup.sh", other)
    # make calls it by this name, for which cd would look where CDPATH says.
    machine.script = "scripts/setup.sh"
    done = machine.setup(PIP_USER="1", CDPATH=str(other.parent))
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert (machine.clone / ".venv/.setup-stamp").exists()


def test_of_two_at_once_one_builds(machine: Machine, tmp_path: Path) -> None:
    machine.python("3.11")
    os.mkfifo(gate := tmp_path / "gate")
    # For both ends, or it would be waited for somebody who reads.
    with os.fdopen(os.open(gate, os.O_RDWR)) as opened:
        first = machine.start(GATE=str(gate))
        until = time.monotonic() + BOUND_S
        while len(machine.told) < 2:
            assert first.poll() is None
            assert time.monotonic() < until
            time.sleep(0.01)
        second = machine.start()
        assert second.stderr is not None
        assert "waiting" in second.stderr.readline()
        os.write(opened.fileno(), b"\n")
        for each in (first, second):
            each.communicate(timeout=BOUND_S)
            assert each.returncode == 0
    assert [line.split()[0] for line in machine.told] == ["venv", "uv"]


def test_where_files_have_no_locks_it_says_so_and_builds(machine: Machine) -> None:
    machine.python("3.11")
    machine.has_no_locks()
    done = machine.setup()
    assert done.returncode == 0, done.stderr
    assert machine.told[0] == "venv 3.11"
    assert done.stderr.count("locked") == 1
    assert "another command is building" not in done.stderr


def test_where_there_is_no_flock_it_says_so_and_builds(machine: Machine) -> None:
    machine.python("3.11")
    (machine.bin / "flock").unlink()
    done = machine.setup()
    assert done.returncode == 0, done.stderr
    assert machine.told[0] == "venv 3.11"
    assert done.stderr.count("no flock") == 1
    again = machine.setup()
    assert (again.returncode, again.stderr, machine.told) == (0, "", [])


def test_a_library_that_is_missing_is_named_before_anything_is_fetched(machine: Machine) -> None:
    machine.python("3.11")
    done = machine.setup(LACKS="numa")
    assert done.returncode == 1
    assert "libnuma.so.1" in done.stderr
    assert "apt-get install libnuma1" in done.stderr
    assert machine.told == []


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        ({}, ""),
        ({"PIP_INDEX_URL": "https://mirror/simple"}, "https://mirror/simple"),
        ({"CONFIGURED_index_url": "https://written/simple"}, "https://written/simple"),
        ({"CONFIGURED_index_url": "https://w/", "PIP_INDEX_URL": "https://said/"}, "https://said/"),
        ({"PIP_INDEX_URL": "https://pip/", "UV_DEFAULT_INDEX": "https://uv/"}, "https://uv/"),
        ({"PIP_INDEX_URL": "https://pip/", "UV_INDEX_URL": "https://uv/"}, "https://uv/"),
    ],
)
def test_pips_index_is_uvs_too(machine: Machine, settings: dict[str, str], asked: str) -> None:
    machine.python("3.11")
    assert machine.setup(**settings).returncode == 0
    assert machine.told[1].startswith(f"uv {asked} pip install")


CPU_INDEX = "--torch-backend cpu"


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("{wheels}", "--find-links {wheels}"),
        ("{wheels}/", "--find-links {wheels}/"),
        ("~/wheels", "--find-links {home}/wheels " + CPU_INDEX),
        # Those beside it bring what else there is.
        (
            "https://a/ {other} {wheels}",
            "--find-links https://a/ --find-links {other} --find-links {wheels}",
        ),
        # Torch is in none of them: in the second for another Python.
        ("https://a/ {other}", "--find-links https://a/ --find-links {other} " + CPU_INDEX),
        # pip passes over what is not there, uv ends with it.
        ("{nowhere} {other}", "--find-links {other} " + CPU_INDEX),
        ("{nowhere}", CPU_INDEX),
        ("{spaced}", "--find-links {spaced}"),
    ],
)
def test_uv_looks_where_pip_does_and_for_torch_there_first(
    machine: Machine, tmp_path: Path, given: str, asked: str
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
    words = machine.told[1].partition(".venv/bin/python ")[2].partition(" --excludes")[0]
    assert words == asked.format_map(places)


def test_uv_has_the_certificates_and_the_other_indexes_that_pip_has(machine: Machine) -> None:
    machine.python("3.11")
    names = "UV_INDEX UV_INDEX_STRATEGY SSL_CERT_FILE"
    given = {"TELL": names, "PIP_CERT": "/c.pem", "PIP_EXTRA_INDEX_URL": "https://a/ https://b/"}
    assert machine.setup(**given, PIP_INDEX_URL="https://m/").returncode == 0
    assert machine.told[2:] == [
        "UV_INDEX=https://a/ https://b/", "UV_INDEX_STRATEGY=unsafe-best-match",
        "SSL_CERT_FILE=/c.pem",
    ]  # fmt: skip
    (machine.clone / ".venv/.setup-stamp").unlink()
    # Beside the public index, and over what uv itself was told, it has none of them.
    assert machine.setup(**given).returncode == 0
    assert machine.told[1:3] == ["UV_INDEX=", "UV_INDEX_STRATEGY="]
    (machine.clone / ".venv/.setup-stamp").unlink()
    own = {"PIP_INDEX_URL": "https://m/", "UV_INDEX": "https://u/", "SSL_CERT_FILE": "/own.pem"}
    assert machine.setup(**given, **own).returncode == 0
    assert machine.told[1:] == [
        "UV_INDEX=https://u/", "UV_INDEX_STRATEGY=", "SSL_CERT_FILE=/own.pem"
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["PIP_NO_INDEX", "CONFIGURED_no_index"])
@pytest.mark.parametrize("said", ["1", "true", "TRUE", "YES", "y", "t", "On"])
def test_without_an_index_all_comes_from_the_places_that_pip_knows(
    machine: Machine, name: str, said: str
) -> None:
    machine.python("3.11")
    places = {"CONFIGURED_find_links": "/ https://w/"}
    assert machine.setup(**places, **{name: said}).returncode == 0
    assert "--find-links / --find-links https://w/ --no-index" in machine.told[1]
    assert CPU_INDEX not in machine.told[1]
    (machine.clone / ".venv/.setup-stamp").unlink()
    assert machine.setup(**places, **{name: "false"}).returncode == 0
    assert "--no-index" not in machine.told[0]
    assert CPU_INDEX in machine.told[0]


def test_without_a_cache_that_can_be_written_uv_does_without(machine: Machine) -> None:
    machine.python("3.11")
    assert machine.setup(TELL="UV_NO_CACHE").returncode == 0
    assert machine.told[2:] == ["UV_NO_CACHE="]
    (machine.clone / ".venv/.setup-stamp").unlink()
    shutil.rmtree(machine.clone / ".cache")
    (machine.clone / ".cache").touch()
    assert machine.setup(TELL="UV_NO_CACHE").returncode == 0
    assert machine.told[1:] == ["UV_NO_CACHE=1"]


def test_versions_are_pinned_unless_they_are_renewed(machine: Machine) -> None:
    machine.python("3.11")
    machine.setup()
    assert "--constraints constraints.txt" in machine.told[-1]
    done = machine.setup(UPDATE="1")
    assert done.returncode == 0, done.stderr
    upgrade = [line for line in machine.told if " pip install " in line][-1]
    assert "--upgrade" in upgrade
    assert "--constraints" not in upgrade
    assert " pip freeze " in machine.told[-1]
