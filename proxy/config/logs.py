"""The block `router.logs`: format, level and contents of the router's log."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from proxy.config.types import Block

Level = Literal["debug", "info", "warning", "error"]


class LogsConfig(Block):
    """The router's log on standard error."""

    format: Literal["text", "json"] = Field(
        "text", description="Format of a line; json writes one object per line"
    )
    level: Level = Field("info", description="Lowest level of the router's own lines")
    requests: bool = Field(False, description="Write one line per request, at its end")
    prompts: bool = Field(
        False,
        description="Include the whole request body in these lines. Readers of the log then see "
        "users' prompts",
    )
