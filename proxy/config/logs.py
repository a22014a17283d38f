"""The block `router.logs`: what is written of requests and of the router itself."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from proxy.config.types import Block

Level = Literal["debug", "info", "warning", "error"]


class LogsConfig(Block):
    """What the router writes to its standard error."""

    format: Literal["text", "json"] = Field("text", description="json: one object a line")
    level: Level = Field("info", description="of the router's own lines, the least that is written")
    requests: bool = Field(False, description="one line for each request, at its end")
    prompts: bool = Field(
        False,
        description="let those lines have the request's whole body: whoever reads the log then "
        "reads what users write",
    )
