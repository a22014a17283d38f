"""The block `router.batches`: the Files and Batches API."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from proxy.config.types import MIB, Block, Count, FilePath


class BatchesConfig(Block):
    """The Files and Batches API; off without a path."""

    path: FilePath | None = Field(
        None,
        description="Folder for files, batches and results; the API is off if not given",
    )
    max_file_bytes: Count = Field(
        48 * MIB, description="Maximum size in bytes of one uploaded file"
    )
    max_bytes: Count = Field(
        16 * 1024 * MIB,
        description="Maximum size in bytes of all files and results together. At the limit, "
        "uploads are refused with 507, and batches pause",
    )
    max_bytes_per_tenant: Count = Field(
        4 * 1024 * MIB,
        description="Maximum size in bytes of one tenant's files and results. At the limit, its "
        "uploads are refused with 413, and its batches pause",
    )
    max_active_per_tenant: Count = Field(
        100,
        description="Maximum number of a tenant's unfinished batches; more are refused with 429",
    )
    max_lines: Count = Field(50_000, description="Maximum number of lines in a batch's input file")
    concurrency: Count = Field(
        32, description="Maximum number of lines in flight, over all batches"
    )
    keep_days: Annotated[float, Field(gt=0)] = Field(
        30.0, description="Days for which files and finished batches are kept"
    )
