"""A PostgreSQL server, and an empty database for each test."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import psycopg
import pytest

from tests.programs import fetched

PASSWORD = "a-password-of-the-database"  # noqa: S105 - of the tests' own server
DEADLINE_S = 60.0
SETTINGS = {
    "listen_addresses": "", "fsync": "off", "full_page_writes": "off", "jit": "off",
    "shared_buffers": "16MB", "max_connections": "40",
}  # fmt: skip
OTHERS = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE datname = 'test' AND usename = 'test' AND pid <> pg_backend_pid()"
)
# Run the tests of these fixtures with both databases, or with one.
BOTH = pytest.mark.parametrize("database", ["sqlite", "postgres"], indirect=True)
SQLITE = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
POSTGRES = pytest.mark.parametrize("database", ["postgres"], indirect=True)


class PostgresServer:
    """A server of the tests' own, on a socket in a new folder. It does not run as root."""

    def __init__(self) -> None:
        self._programs = Path(fetched("postgres"))
        self._folder = Path(tempfile.mkdtemp(prefix="postgres-"))
        self._user = pwd.getpwnam("nobody") if os.getuid() == 0 else pwd.getpwuid(os.getuid())
        (self._folder / "password").write_text(PASSWORD)
        for path in (self._folder, self._folder / "password"):
            os.chown(path, self._user.pw_uid, self._user.pw_gid)
        self._start("initdb", "-N", "-U", "test", "-A", "scram-sha-256", "--pwfile=password",
                    "-E", "UTF8", "--no-locale", "-D", "data").wait()  # fmt: skip
        self.start()
        self.execute("CREATE DATABASE test")

    def _start(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        groups: dict[str, object] = {"extra_groups": []} if os.getuid() == 0 else {}
        with (self._folder / "log").open("ab") as log:
            return subprocess.Popen(
                [self._programs / program, *arguments], stdout=log, stderr=log, cwd=self._folder,
                user=self._user.pw_uid, group=self._user.pw_gid, **groups,  # type: ignore[call-overload]
            )  # fmt: skip

    def url(self, name: str, password: str = PASSWORD) -> str:
        return f"postgresql://test:{password}@/{name}?host={self._folder}"

    def new_database(self) -> str:
        """Return the URL of an empty database, the same each time: one has 300 files."""
        with psycopg.connect(self.url("test"), autocommit=True) as connection:
            while connection.execute(OTHERS).rowcount:  # they may keep locks for a moment
                time.sleep(0.01)
            connection.execute("DROP SCHEMA IF EXISTS vllm_sched CASCADE")
        return self.url("test")

    def execute(self, sql: str, url: str = "") -> None:
        with psycopg.connect(url or self.url("postgres"), autocommit=True) as connection:
            connection.execute(sql.encode())

    def start(self) -> None:
        """Start the server, and wait until it accepts connections."""
        settings = SETTINGS | {"unix_socket_directories": str(self._folder)}
        options = [f"-c{name}={value}" for name, value in settings.items()]
        self._process = self._start("postgres", "-D", "data", *options)
        end = time.monotonic() + DEADLINE_S
        while True:
            try:
                self.execute("SELECT 1")
            except psycopg.OperationalError:
                log = (self._folder / "log").read_text()
                assert self._process.poll() is None, log
                assert time.monotonic() < end, log
                time.sleep(0.02)
            else:
                return

    def stop(self) -> None:
        """Stop the server at once, as a crash does."""
        self.execute("CHECKPOINT")  # the next start has less to recover
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(DEADLINE_S)

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self._folder)
