"""Tables of the store, and how its database counts each tenant's bytes."""

from __future__ import annotations

from collections.abc import Iterator

from proxy.batches.types import ACTIVE

VERSION = 1
TABLES = """
CREATE TABLE files (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, name TEXT NOT NULL, purpose TEXT NOT NULL,
    created REAL NOT NULL, expires REAL NOT NULL, bytes INTEGER NOT NULL,
    batch TEXT, ok INTEGER NOT NULL, content BLOB);
CREATE TABLE batches (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, endpoint TEXT NOT NULL, input TEXT NOT NULL,
    "window" TEXT NOT NULL, status TEXT NOT NULL, created REAL NOT NULL, expires REAL NOT NULL,
    metadata TEXT, complaints TEXT NOT NULL DEFAULT '[]',
    total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0, output TEXT, error TEXT, at TEXT NOT NULL DEFAULT '{}');
CREATE INDEX batches_by_status ON batches (status);
CREATE TABLE lines (
    batch TEXT NOT NULL, number INTEGER NOT NULL, custom_id TEXT NOT NULL, model TEXT NOT NULL,
    start INTEGER NOT NULL, size INTEGER NOT NULL,
    PRIMARY KEY (batch, number), UNIQUE (batch, custom_id)) WITHOUT ROWID;
CREATE TABLE results (
    batch TEXT NOT NULL, number INTEGER NOT NULL, ok INTEGER NOT NULL, content BLOB NOT NULL,
    PRIMARY KEY (batch, number));
"""
USED = "CREATE TABLE used (tenant TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID"
ROW_BYTES = 300  # bytes of a row and its index entries without client data
# Size of the client data in a row, and the row's tenant, by table. `octets` is the database's
# expression for the bytes of a text.
CLIENT_BYTES = {
    "files": "CASE WHEN {row}.batch IS NULL THEN {row}.bytes ELSE 0 END + <name>",
    "batches": "<complaints> + <metadata>",
    "lines": "<custom_id> + <custom_id> + <model>",  # custom_id is also in an index
    "results": "length({row}.content)",
}
# The condition on `batches` that one is active, and on `lines AS l` that a line has no result.
UNSAVED = "NOT EXISTS (SELECT 1 FROM results AS r WHERE r.batch = l.batch AND r.number = l.number)"
IS_ACTIVE = f"status IN ({', '.join(map(repr, map(str, ACTIVE)))})"
OWN_TENANT, BATCH_TENANT = "{row}.tenant", "(SELECT tenant FROM batches WHERE id = {row}.batch)"
ROW_TENANT = {
    "files": OWN_TENANT,
    "batches": OWN_TENANT,
    "lines": BATCH_TENANT,
    "results": BATCH_TENANT,
}


def tenant_of(table: str, row: str) -> str:
    return ROW_TENANT[table].format(row=row)


def size_of(table: str, row: str, octets: str) -> str:
    """Return the expression for a row's size; `octets` is that for a text, as in `length({})`."""
    size = CLIENT_BYTES[table]
    for column in ("name", "complaints", "metadata", "custom_id", "model"):
        size = size.replace(f"<{column}>", f"coalesce({octets.format('{row}.' + column)}, 0)")
    return f"{ROW_BYTES} + {size.format(row=row)}"


def count_all(octets: str) -> str:
    """Return the statement that fills `used` from all rows."""
    had = " UNION ALL ".join(
        f"SELECT {tenant_of(table, table)} AS tenant, {size_of(table, table, octets)} AS size "  # noqa: S608
        f"FROM {table}"
        for table in CLIENT_BYTES
    )
    return (
        f"INSERT INTO used SELECT tenant, sum(size) FROM ({had}) AS had "  # noqa: S608
        "WHERE tenant IS NOT NULL GROUP BY tenant"
    )


# SQLite

# The cast makes the length count bytes; a text's length ends at its first NUL.
SQLITE_OCTETS = "length(CAST({} AS BLOB))"


def sqlite_usage() -> Iterator[str]:
    """Yield statements that make SQLite count each tenant's bytes.

    Separate from `TABLES`, with the same version: older databases get the count added, and triggers
    keep it correct in older releases.
    """
    yield USED
    yield "CREATE INDEX files_by_tenant ON files (tenant)"
    yield "CREATE INDEX batches_by_tenant ON batches (tenant)"
    yield count_all(SQLITE_OCTETS)
    for table in CLIENT_BYTES:
        yield _trigger(table, "INSERT", "NEW", _size(table, "NEW"))
        yield _trigger(table, "DELETE", "OLD", f"-({_size(table, 'OLD')})")
    changed = f"{_size('batches', 'NEW')} - ({_size('batches', 'OLD')})"
    yield _trigger("batches", "UPDATE", "NEW", changed)


def _size(table: str, row: str) -> str:
    return size_of(table, row, SQLITE_OCTETS)


def _trigger(table: str, event: str, row: str, more: str) -> str:
    tenant = tenant_of(table, row)
    count = f"UPDATE used SET bytes = bytes + {more} WHERE tenant = {tenant};"  # noqa: S608
    if ROW_TENANT[table] is OWN_TENANT:  # a tenant's first row is a file or a batch
        count = f"INSERT OR IGNORE INTO used VALUES ({tenant}, 0); {count}"  # noqa: S608
    return f"CREATE TRIGGER {table}_{event.lower()} AFTER {event} ON {table} BEGIN {count} END"


# PostgreSQL

SCHEMA = "vllm_sched"
TYPES = {"REAL": "DOUBLE PRECISION", "INTEGER": "BIGINT", "BLOB": "BYTEA", " WITHOUT ROWID": ""}
POSTGRES_OCTETS = "octet_length({})"
# A line is claimed by a replica, which lives until its lease ends.
POSTGRES_ONLY = """
ALTER TABLE files ADD rowid BIGINT GENERATED ALWAYS AS IDENTITY UNIQUE;
ALTER TABLE batches ADD rowid BIGINT GENERATED ALWAYS AS IDENTITY UNIQUE;
ALTER TABLE files ALTER content SET STORAGE EXTERNAL;
CREATE INDEX files_by_tenant ON files (tenant, rowid);
CREATE INDEX batches_by_tenant ON batches (tenant, rowid);
ALTER TABLE lines ADD owner TEXT;
CREATE INDEX lines_unclaimed ON lines (batch, number) WHERE owner IS NULL;
CREATE TABLE replicas (id TEXT PRIMARY KEY, until TIMESTAMPTZ NOT NULL);
CREATE TABLE versions (version INTEGER NOT NULL)
"""
COUNT = """
CREATE FUNCTION count_{name}() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    INSERT INTO used SELECT tenant, sum(size) FROM ({rows}) AS changes
        WHERE tenant IS NOT NULL GROUP BY tenant
        ON CONFLICT (tenant) DO UPDATE SET bytes = used.bytes + excluded.bytes;
    RETURN NULL;
END $$;
CREATE TRIGGER count_{name} AFTER {event} ON {table} {referencing}
    FOR EACH STATEMENT EXECUTE FUNCTION count_{name}()
"""
SIDES = {"INSERT": {"NEW": ""}, "DELETE": {"OLD": "-"}, "UPDATE": {"NEW": "", "OLD": "-"}}


def postgres_tables() -> str:
    """Return the statements that create the tables in an empty schema."""
    tables = f"{TABLES}{USED};"
    for sqlite, postgres in TYPES.items():
        tables = tables.replace(sqlite, postgres)
    events = [(table, event) for table in CLIENT_BYTES for event in ("INSERT", "DELETE")]
    return tables + ";".join(
        [
            POSTGRES_ONLY,
            f"INSERT INTO versions VALUES ({VERSION})",  # noqa: S608
            *(_count(*event) for event in [*events, ("batches", "UPDATE")]),
        ]
    )


def _count(table: str, event: str) -> str:
    """Return a trigger for each statement: the rows of a batch's lines belong to one tenant."""
    sides = SIDES[event]
    rows = " UNION ALL ".join(
        f"SELECT {tenant_of(table, 'x')} AS tenant, "  # noqa: S608
        f"{sign}({size_of(table, 'x', POSTGRES_OCTETS)}) AS size FROM {side}_rows AS x"
        for side, sign in sides.items()
    )
    return COUNT.format(
        name=f"{table}_{event.lower()}",
        table=table,
        event=event,
        rows=rows,
        referencing="REFERENCING " + " ".join(f"{side} TABLE AS {side}_rows" for side in sides),
    )
