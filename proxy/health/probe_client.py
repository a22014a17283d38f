"""What a worker is asked over HTTP, and how little of an answer is believed."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, NamedTuple

import orjson

from proxy.config import WorkerTlsConfig
from proxy.errors import ProxyError
from proxy.health.http_client import HttpClient, ProbeResponseError
from proxy.net.tls import TlsError

MAX_PAGE_BYTES = 8 << 20
MAX_MODELS = 1000
MAX_NAME = 200
MAX_ROOT = 4096
# The worker is alive, but lists its models to nobody, or not to us.
KEPT_FROM_US = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND)


class ProbeError(ProxyError):
    """A worker that did not answer as a healthy one does; the message says what it did."""


class SilentError(ProbeError):
    """A worker that did not answer in time: hung, or only busy."""


class ModelCard(NamedTuple):
    """What a worker says of a model."""

    length: int | None  # the longest context
    root: str | None  # what was loaded for it: a folder, or a name on a hub
    parent: str | None  # of an adapter, the model that it is for


Models = dict[str, ModelCard]  # by name


class ProbeClient:
    """Those for one worker, over a connection that is kept until `close`."""

    def __init__(
        self, url: str, api_key: str | None, timeout_s: float, tls: WorkerTlsConfig | None = None
    ) -> None:
        self.timeout_s = timeout_s  # for each
        self._asker = HttpClient(url, api_key, tls)

    def close(self) -> None:
        """Leave nothing open."""
        self._asker.close()

    async def health(self) -> None:
        """Raise unless /health is 200."""
        status, _ = await self._get("/health")
        if status != HTTPStatus.OK:
            raise ProbeError(f"GET /health: status {status}")

    async def metrics(self) -> bytes:
        """Fetch /metrics."""
        status, page = await self._get("/metrics")
        if status != HTTPStatus.OK:
            raise ProbeError(f"GET /metrics: status {status}")
        return page

    async def served(self) -> Models:
        """Read /v1/models; nothing if that is not for us."""
        status, body = await self._get("/v1/models")
        if status in KEPT_FROM_US:
            return {}
        if status != HTTPStatus.OK:
            raise ProbeError(f"GET /v1/models: status {status}")
        return read_models(body)

    async def _get(self, path: str) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self._asker.get(path, MAX_PAGE_BYTES)
        except TimeoutError:
            raise SilentError(f"GET {path}: no answer in time") from None
        except (ProbeResponseError, TlsError, OSError, ValueError) as error:
            raise ProbeError(f"GET {path}: {error or type(error).__name__}") from None


def read_models(body: bytes) -> Models:
    """Read a list of models; raise if it is none."""
    models: Models = {}
    try:
        cards: Any = orjson.loads(body)["data"]
        models = {str(card["id"])[:MAX_NAME]: _card(card) for card in cards[:MAX_MODELS]}
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    if not models:
        raise ProbeError("GET /v1/models: no list of models")
    return models


def _card(said: dict[str, Any]) -> ModelCard:
    length = said.get("max_model_len")
    told = length if type(length) is int and length > 0 else None
    return ModelCard(told, _text(said.get("root")), _text(said.get("parent")))


def _text(said: object) -> str | None:
    return said if type(said) is str and 0 < len(said) <= MAX_ROOT else None
