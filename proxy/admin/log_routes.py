"""What is logged, shown and changed while the router runs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from proxy.config.logs import Level
from proxy.telemetry.logs import Logs

LoggerName = Annotated[str, Field(pattern=r"^((proxy|vllm_sched)(\.\w+)*)?$", max_length=100)]


class LogsShown(BaseModel):
    """What is logged."""

    format: str
    requests: bool = Field(description="whether each request has a line")
    prompts: bool = Field(description="whether that has its body; only the fleet file changes this")
    levels: dict[str, str] = Field(description="by logger; the one without a name is for the rest")
    written: int = Field(description="lines")
    dropped: int = Field(description="lines for which there was no room")


class LogsChange(BaseModel):
    """What is to be otherwise, until the fleet file is read again."""

    model_config = ConfigDict(extra="forbid")

    requests: bool | None = None
    levels: dict[LoggerName, Level] = Field(
        default_factory=dict, description='as {"": "warning", "proxy.discovery.discovery": "debug"}'
    )


def log_routes(logs: Logs) -> APIRouter:
    """Show, and change."""
    api = APIRouter()

    @api.get("/logs", summary="Show what is logged")
    async def show() -> LogsShown:
        return shown(logs)

    @api.put("/logs", summary="Change what is logged, until the fleet file is read again")
    async def change(wanted: LogsChange) -> LogsShown:
        if logs.tell_all is not None:
            await logs.tell_all(wanted.requests, wanted.levels)
        else:
            logs.change(wanted.requests, wanted.levels)
        return shown(logs)

    return api


def shown(logs: Logs) -> LogsShown:
    """Describe them."""
    return LogsShown(
        format=logs.settings.format,
        requests=logs.requests,
        prompts=logs.settings.prompts,
        levels=logs.levels(),
        written=logs.writer.written,
        dropped=logs.writer.dropped,
    )
