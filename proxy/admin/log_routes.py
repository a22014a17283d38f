"""Routes that show and change the log settings at run time."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from proxy.config.telemetry import Level
from proxy.telemetry.logs import Logs

LoggerName = Annotated[str, Field(pattern=r"^((proxy|vllm_sched)(\.\w+)*)?$", max_length=100)]


class LogsShown(BaseModel):
    """The log settings."""

    format: str
    requests: bool = Field(description="whether every request is logged")
    prompts: bool = Field(
        description="whether request bodies are logged; only the fleet file sets this"
    )
    levels: dict[str, str] = Field(description="level by logger; the empty name is the root logger")
    written: int = Field(description="lines written")
    dropped: int = Field(description="lines dropped because the write queue was full")


class LogsChange(BaseModel):
    """A change that lasts until the next reload of the fleet file."""

    model_config = ConfigDict(extra="forbid")

    requests: bool | None = None
    levels: dict[LoggerName, Level] = Field(
        default_factory=dict,
        description='example: {"": "warning", "proxy.discovery.discovery": "debug"}',
    )


def log_routes(logs: Logs) -> APIRouter:
    api = APIRouter()

    @api.get("/logs", summary="Show the log settings")
    async def show() -> LogsShown:
        return shown(logs)

    @api.put("/logs", summary="Change the log settings until the fleet file is read again")
    async def change(change_request: LogsChange) -> LogsShown:
        if logs.change_all is not None:
            await logs.change_all(change_request.requests, change_request.levels)
        else:
            logs.change(change_request.requests, change_request.levels)
        return shown(logs)

    return api


def shown(logs: Logs) -> LogsShown:
    return LogsShown(
        format=logs.settings.format,
        requests=logs.requests,
        prompts=logs.settings.prompts,
        levels=logs.levels(),
        written=logs.writer.written,
        dropped=logs.writer.dropped,
    )
