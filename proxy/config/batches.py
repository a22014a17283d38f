"""The block `router.batches`: the Files and Batches API."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from proxy.config.types import MIB, Block, Count, FilePath


def postgres_url(url: str) -> str:
    if not url.startswith(("postgresql://", "postgres://")):
        raise ValueError("write it as postgresql://user@host/name")
    return url


class BatchesConfig(Block):
    """The Files and Batches API; off without a path or database."""

    path: FilePath | None = None
    """Folder for files, batches and results, with a SQLite database. The API is off if neither
    path nor database is given"""
    database: Annotated[str, AfterValidator(postgres_url)] | None = Field(None, repr=False)
    """URL of a PostgreSQL database, instead of path: postgresql://user@host/name. All routers
    with the same database run its batches together"""
    database_password_file: FilePath | None = None
    """File with the password of the database, read at each connection; otherwise the password is
    that of the URL, or of libpq's environment (PGPASSWORD, PGPASSFILE)"""
    max_file_bytes: Count = 48 * MIB
    """Maximum size in bytes of one uploaded file"""
    max_bytes: Count = 16 * 1024 * MIB
    """Maximum size in bytes of all files and results together. At the limit, uploads are refused
    with 507, and batches pause"""
    max_bytes_per_tenant: Count = 4 * 1024 * MIB
    """Maximum size in bytes of one tenant's files and results. At the limit, its uploads are
    refused with 413, and its batches pause"""
    max_active_per_tenant: Count = 100
    """Maximum number of a tenant's unfinished batches; more are refused with 429"""
    max_lines: Count = 50_000
    """Maximum number of lines in a batch's input file"""
    concurrency: Count = 32
    """Maximum number of lines in flight, over all batches; with database, of each router process"""
    keep_days: Annotated[float, Field(gt=0)] = 30.0
    """Days for which files and finished batches are kept"""

    @property
    def are_on(self) -> bool:
        return self.path is not None or self.database is not None
