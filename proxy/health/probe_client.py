"""The requests that probe a worker."""

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
MAX_NAME_CHARS = 200
MAX_ROOT_CHARS = 4096
# The worker runs, but does not list its models without a key, or at all.
NO_MODEL_LIST = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND)


class ProbeError(ProxyError):
    """A failed probe."""


class SilentError(ProbeError):
    """A probe without a response in time; the worker may only be busy."""


class ModelCard(NamedTuple):
    """A model in a worker's /v1/models."""

    length: int | None  # context length in tokens
    root: str | None  # the loaded folder or repository
    parent: str | None  # the base model of an adapter


Models = dict[str, ModelCard]  # by name


class ProbeClient:
    """Probes of one worker, over a connection that stays open until `close`."""

    def __init__(
        self, url: str, api_key: str | None, timeout_s: float, tls: WorkerTlsConfig | None = None
    ) -> None:
        self.timeout_s = timeout_s  # per request
        self._asker = HttpClient(url, api_key, tls)

    def close(self) -> None:
        self._asker.close()

    async def health(self) -> None:
        """Raise unless /health is 200."""
        status, _ = await self._get("/health")
        if status != HTTPStatus.OK:
            raise ProbeError(f"GET /health: status {status}")

    async def metrics(self) -> bytes:
        status, page = await self._get("/metrics")
        if status != HTTPStatus.OK:
            raise ProbeError(f"GET /metrics: status {status}")
        return page

    async def served_models(self) -> Models:
        """Return the models of /v1/models; empty if the worker refuses to list them."""
        status, body = await self._get("/v1/models")
        if status in NO_MODEL_LIST:
            return {}
        if status != HTTPStatus.OK:
            raise ProbeError(f"GET /v1/models: status {status}")
        return read_models(body)

    async def _get(self, path: str) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self._asker.get(path, MAX_PAGE_BYTES)
        except TimeoutError:
            raise SilentError(f"GET {path}: no response in time") from None
        except (ProbeResponseError, TlsError, OSError, ValueError) as error:
            raise ProbeError(f"GET {path}: {error or type(error).__name__}") from None


def read_models(body: bytes) -> Models:
    """Return the models in a /v1/models body; raise `ProbeError`."""
    models: Models = {}
    try:
        cards: Any = orjson.loads(body)["data"]
        models = {str(card["id"])[:MAX_NAME_CHARS]: _card(card) for card in cards[:MAX_MODELS]}
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    if not models:
        raise ProbeError("GET /v1/models: the response has no list of models")
    return models


def _card(raw: dict[str, Any]) -> ModelCard:
    length = raw.get("max_model_len")
    max_len = length if type(length) is int and length > 0 else None
    return ModelCard(max_len, _text(raw.get("root")), _text(raw.get("parent")))


def _text(raw: object) -> str | None:
    return raw if type(raw) is str and 0 < len(raw) <= MAX_ROOT_CHARS else None
