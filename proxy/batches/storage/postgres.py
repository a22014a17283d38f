"""PostgreSQL: a database whose batches several routers run together.

A process claims the lines that it sends until its lease ends, by the server's clock; operations
renew it. The process with the lock LEAD leads for as long as its connection lives. Transactions
that write have the lock WRITE, as SQLite allows one at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from math import inf
from pathlib import Path
from select import POLLIN, poll
from time import monotonic
from typing import Any

from proxy.batches.storage.backend import Backend, BatchDuties, Row
from proxy.batches.storage.rows import new_id, placeholders
from proxy.batches.storage.schema import SCHEMA, UNSAVED, VERSION, postgres_tables
from proxy.batches.types import DiskError, StoreFullError
from proxy.config.redact import without_password
from proxy.errors import ProxyError
from proxy.text_files import UnreadableFileError, read_text

try:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict, make_conninfo
    from psycopg.pq import ConnStatus, PGconn, Ping
    from psycopg.types.string import StrDumper, TextBinaryLoader
except ImportError as missing:
    raise ProxyError(
        f"router.batches.database: {missing}; pip install 'vllm-sched[postgres]'"
    ) from None

SETTING = "router.batches.database"
MIN_VERSION = 130000
LEASE_S, RENEW_S = 10.0, 2.0
RECONNECT_S = 1.0  # after a failed attempt
LEAD, WRITE = 0x766C6C6D01, 0x766C6C6D02  # advisory locks
# A connection to a host that has vanished ends within 15 s, on both sides.
CONNECTION = {
    "connect_timeout": 5, "keepalives_idle": 5, "keepalives_interval": 3, "keepalives_count": 3,
    "tcp_user_timeout": 15000, "client_encoding": "utf8",
}  # fmt: skip
SESSION = f"""
SET search_path = {SCHEMA};
SET default_transaction_isolation = 'read committed';
SET lock_timeout = '30s';
SET statement_timeout = '60s';
SET idle_in_transaction_session_timeout = '15s';
SET tcp_keepalives_idle = 5;
SET tcp_keepalives_interval = 3;
SET tcp_keepalives_count = 3;
SET tcp_user_timeout = 15000;
SELECT set_config('synchronous_commit', 'on', false)
    WHERE current_setting('synchronous_commit') = 'off'
"""
CLAIM = f"""
WITH free AS MATERIALIZED (
    SELECT number, size FROM lines AS l WHERE batch = ? AND owner IS NULL AND {UNSAVED}
    ORDER BY number LIMIT ? FOR UPDATE OF l SKIP LOCKED),
first AS (SELECT number, size, sum(size) OVER (ORDER BY number) AS total FROM free)
UPDATE lines AS l SET owner = ? FROM first
WHERE l.batch = ? AND l.number = first.number AND (total <= ? OR total = first.size)
RETURNING l.number, custom_id, model, start, l.size
"""  # noqa: S608
CLAIMED = f"SELECT batch, number FROM lines AS l WHERE owner = ? AND {UNSAVED}"  # noqa: S608
RELEASE = f"UPDATE lines AS l SET owner = NULL WHERE owner = ANY(?) AND {UNSAVED}"  # noqa: S608
RENEW = "UPDATE replicas SET until = clock_timestamp() + make_interval(secs => ?) WHERE id = ?"
JOIN = "INSERT INTO replicas VALUES (?, clock_timestamp() + make_interval(secs => ?))"
# All leases end while a server is down. After its start, replicas have time to renew theirs.
DEAD = """
DELETE FROM replicas WHERE id IN (
    SELECT id FROM replicas WHERE until < clock_timestamp()
    AND pg_postmaster_start_time() < clock_timestamp() - make_interval(secs => ?)
    FOR UPDATE SKIP LOCKED)
RETURNING id
"""
# A replica that hangs must not lead, and its claims are void.
DISCONNECT = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE application_name = ANY(?) AND usename = current_user"
)
PIECES = """
SELECT substring(content FROM start + 1 FOR size)
FROM files, unnest(?::int[], ?::int[]) WITH ORDINALITY AS place(start, size, nth)
WHERE id = ? ORDER BY nth
"""
DISK_FULL, NO_TABLE, NO_SCHEMA = "53100", "42P01", "3F000"
# Classes of errors that concern the server, and not a statement.
SERVER_ERRORS = ("08", "25", "3D", "40", "53", "57", "58", "XX", "28")
MORE_ERRORS = ("55P03", "42501", NO_TABLE, NO_SCHEMA)
MAX_VALUES, MAX_BYTES = 60_000, 16 << 20  # of one statement


class ServerDownError(DiskError):
    """The server does not respond; it may come back."""


class PostgresBackend(Backend):
    """One connection to a database, opened again when it is lost.

    The server's autovacuum uses free space again.
    """

    is_shared = True

    def __init__(self, url: str, password_file: Path | None = None) -> None:
        self._url = url
        self._password_file = password_file
        self._error_prefix = f"{SETTING}: {without_password(url)}"
        self._id = new_id("vllm-sched_")
        self._connection: psycopg.Connection[Any] | None = None
        self._failed = DiskError("")
        self._retry_at = self._renewed_at = -inf
        self._session = 0
        self._leads = self._joined = self._lost = False
        with suppress(ServerDownError), self.errors():
            self.check()

    # Connection

    def check(self) -> None:
        if not self._is_connected():
            self._disconnect()
            if monotonic() < self._retry_at:
                raise self._failed
            try:
                self._connection = self._connect()
            except DiskError as error:
                self._failed, self._retry_at = error, monotonic() + RECONNECT_S
                raise
            self._session += 1
            self._renewed_at = -inf
        if self._joined and monotonic() >= self._renewed_at + RENEW_S:
            self._renew_lease()

    def _is_connected(self) -> bool:
        connection = self._connection
        if connection is None or connection.closed:
            return False
        arrived = poll()
        arrived.register(connection.fileno(), POLLIN)
        if arrived.poll(0):  # usually the end of the connection
            with suppress(psycopg.OperationalError):
                connection.pgconn.consume_input()
        return connection.pgconn.status == ConnStatus.OK

    def _connect(self) -> psycopg.Connection[Any]:
        options: dict[str, Any] = {**CONNECTION}
        try:
            options |= conninfo_to_dict(self._url) | {"application_name": self._id}
            if self._password_file is not None:
                options["password"] = read_text(self._password_file).strip()
            connection = psycopg.connect(**options, autocommit=True)
        except UnreadableFileError as error:
            file = self._password_file
            raise DiskError(f"{SETTING}_password_file: {str(file)!r}: {error}") from None
        except (OSError, UnicodeError) as error:
            raise DiskError(f"{self._error_prefix}: {error}") from None
        except psycopg.Error as error:
            kind = DiskError
            if isinstance(error, psycopg.OperationalError):
                ping = PGconn.ping(make_conninfo(**options).encode())
                kind = ServerDownError if ping in (Ping.REJECT, Ping.NO_RESPONSE) else DiskError
            text = str(error)
            for secret in (self._url, str(options.get("password") or self._url)):
                text = text.replace(secret, "***")
            raise kind(f"{self._error_prefix}: {' '.join(text.split())}") from None
        try:
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _prepare(self, connection: psycopg.Connection[Any]) -> None:
        """Set up a session, and create the tables if they are missing."""
        info = connection.info
        if info.server_version < MIN_VERSION:
            version = f"{info.server_version // 10000}.{info.server_version % 10000}"
            raise DiskError(f"{self._error_prefix}: PostgreSQL {version}; 13 or newer is needed")
        if (encoding := info.parameter_status("server_encoding")) != "UTF8":
            raise DiskError(f"{self._error_prefix}: its encoding is {encoding}; UTF8 is needed")
        connection.adapters.register_dumper(str, EscapingDumper)
        connection.adapters.register_loader("text", EscapingLoader)
        connection.execute(SESSION)
        tables = "SELECT to_regclass('versions')"
        if connection.execute(tables).fetchone() == (None,):
            with connection.transaction():
                connection.execute("SELECT pg_advisory_xact_lock(%s)", (WRITE,))
                schema = connection.execute("SELECT to_regnamespace(%s)", (SCHEMA,)).fetchone()
                if schema == (None,):
                    connection.execute(f"CREATE SCHEMA {SCHEMA}")
                if connection.execute(tables).fetchone() == (None,):
                    connection.execute(postgres_tables().encode())
        row = connection.execute("SELECT max(version) FROM versions").fetchone()
        if row != (VERSION,):
            raise DiskError(
                f"{self._error_prefix}: written by another release (schema {row and row[0]}, not "
                f"{VERSION}); give another database"
            )

    @contextmanager
    def errors(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            state = error.sqlstate or ""
            text = f"{self._error_prefix}: {' '.join(str(error).split())}"
            if state == DISK_FULL:
                raise StoreFullError(text) from None
            if not state and isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError)):
                self._disconnect()
                raise ServerDownError(text) from None
            if not state.startswith(SERVER_ERRORS) and state not in MORE_ERRORS:
                raise
            if state in (NO_TABLE, NO_SCHEMA):
                self._disconnect()  # the tables are created at the next connection
            raise DiskError(text) from None

    def _disconnect(self) -> None:
        self._leads = False
        if self._connection is not None:
            self._connection.close()

    def close(self) -> None:
        if self._connection is None:
            return
        with suppress(psycopg.Error), self._connection, self._connection.transaction():
            self.execute("DELETE FROM replicas WHERE id = ?", (self._id,))
            self.execute(RELEASE, ([self._id],))

    # Statements

    @property
    def connection(self) -> psycopg.Connection[Any]:
        if self._connection is None:
            raise self._failed
        return self._connection

    def execute(self, sql: str, values: Row = ()) -> psycopg.Cursor[Any]:
        return self.connection.execute(sql.replace("?", "%s").encode(), values, binary=True)

    def insert(self, table: str, columns: str, rows: Iterable[Row]) -> None:
        self._insert(f"INSERT INTO {table} ({columns}) VALUES ", list(rows), "")  # noqa: S608

    def insert_new(self, table: str, columns: str, rows: Sequence[Row]) -> list[Row]:
        first = ", ".join(columns.split(",")[:3])
        return self._insert(
            f"INSERT INTO {table} ({columns}) VALUES ",  # noqa: S608
            rows,
            f" ON CONFLICT DO NOTHING RETURNING {first}",
        )

    def _insert(self, begin: str, rows: Sequence[Row], end: str) -> list[Row]:
        inserted: list[Row] = []
        for chunk in chunks(rows):
            values = [value for row in chunk for value in row]
            marks = ", ".join(f"({placeholders(row)})" for row in chunk)
            cursor = self.execute(f"{begin}{marks}{end}", values)
            inserted += cursor.fetchall() if end else ()
        return inserted

    @contextmanager
    def writing(self) -> Iterator[None]:
        with self.errors(), self.connection.transaction():
            self.execute("SELECT pg_advisory_xact_lock(?)", (WRITE,))
            yield

    def contents(self, file_id: str, places: Sequence[tuple[int, int]]) -> list[bytes]:
        if not places:
            return []
        starts, sizes = zip(*places, strict=True)
        pieces = self.execute(PIECES, (list(starts), list(sizes), file_id)).fetchall()
        return [bytes(row[0]) for row in pieces] or [b""] * len(places)

    def check_room(self, size: int) -> None:
        """Do nothing: the server reports a full disk."""

    # Claims

    def renew_duties(self) -> BatchDuties:
        self.check()
        if not self._joined:
            self._renew_lease()
        lost, self._lost = self._lost, False
        return BatchDuties(
            sends_lines=True, leads=self._leads, session=self._session, lost_claims=lost
        )

    def has_led_since(self, session: int) -> bool:
        return self._leads and session == self._session

    def _renew_lease(self) -> None:
        with self.connection.transaction():
            if not self.execute(RENEW, (LEASE_S, self._id)).rowcount:
                self._lost = self._joined  # others freed the lines
                self.execute(JOIN, (self._id, LEASE_S))
            if dead := [row[0] for row in self.execute(DEAD, (LEASE_S,)).fetchall()]:
                self.execute(DISCONNECT, (dead,))
                self.execute(RELEASE, (dead,))
        if not self._leads:
            row = self.execute("SELECT pg_try_advisory_lock(?)", (LEAD,)).fetchone()
            self._leads = row == (True,)
        self._joined, self._renewed_at = True, monotonic()

    def claiming(self) -> AbstractContextManager[object]:
        return self.connection.transaction()

    def lines(self, batch: str, after: int, limit: int, max_bytes: int) -> list[Row]:  # noqa: ARG002
        """Claim lines; `after` has no meaning, because claimed lines are passed over."""
        values = (batch, limit, self._id, batch, max_bytes)
        return sorted(self.execute(CLAIM, values).fetchall())

    def release_lines(self, batch: str, numbers: Sequence[int]) -> None:
        self.execute(
            f"{RELEASE} AND batch = ? AND number = ANY(?)", ([self._id], batch, list(numbers))
        )

    def claimed_lines(self) -> list[tuple[str, int]]:
        return [(batch, number) for batch, number in self.execute(CLAIMED, (self._id,)).fetchall()]


def chunks(rows: Iterable[Row]) -> Iterator[Sequence[Row]]:
    chunk: list[Row] = []
    values = size = 0
    for row in rows:
        more = sum(len(value) for value in row if isinstance(value, bytes))
        if chunk and (values + len(row) > MAX_VALUES or size + more > MAX_BYTES):
            yield chunk
            chunk, values, size = [], 0, 0
        chunk.append(row)
        values, size = values + len(row), size + more
    if chunk:
        yield chunk


# PostgreSQL's text cannot have the character NUL, which clients may send.
ESCAPE, NUL = "\x01", "\x00"


class EscapingDumper(StrDumper):
    """Writes text with NUL escaped."""

    oid = 0  # unknown: the server takes the column's type

    def dump(self, obj: str) -> Any:
        return super().dump(obj.replace(ESCAPE, ESCAPE + "1").replace(NUL, ESCAPE + "0"))


class EscapingLoader(TextBinaryLoader):
    """Reads text with NUL escaped."""

    def load(self, data: Any) -> str:
        text = str(super().load(data))
        if ESCAPE not in text:
            return text
        return text.replace(ESCAPE + "0", NUL).replace(ESCAPE + "1", ESCAPE)
