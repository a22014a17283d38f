"""The block `router.batches`: files of requests that are run in the gaps."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from proxy.config.types import MIB, Block, Count, FilePath


class BatchesConfig(Block):
    """Off unless there is a path."""

    path: FilePath | None = Field(
        None, description="a folder for what has to outlive a restart; batches are off without it"
    )
    max_file_bytes: Count = Field(48 * MIB, description="of one uploaded file")
    max_bytes: Count = Field(
        16 * 1024 * MIB,
        description="of all files and results together; more is refused with 507, and batches held",
    )
    max_bytes_per_tenant: Count = Field(
        4 * 1024 * MIB,
        description="of one tenant's files and results; more is refused with 413, its batches held",
    )
    max_active_per_tenant: Count = Field(
        100, description="batches of one tenant that are not over; more are refused with 429"
    )
    max_lines: Count = Field(50_000, description="of one batch's input")
    concurrency: Count = Field(32, description="lines in flight at once, of all batches together")
    keep_days: Annotated[float, Field(gt=0)] = Field(
        30.0, description="that files and batches that are over are kept"
    )
