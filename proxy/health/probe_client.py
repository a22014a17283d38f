"""The requests that probe a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine
from http import HTTPStatus
from typing import Any, NamedTuple

import orjson

from proxy.config import WorkerTlsConfig
from proxy.errors import ProxyError
from proxy.health.http_client import Answer, HttpClient, ProbeResponseError
from proxy.net.tls import TlsError

MAX_PAGE_BYTES = 8 << 20
MAX_MODELS = 1000
MAX_NAME_CHARS = 200
MAX_ROOT_CHARS = 4096
# The worker runs, but does not list its models without a key, or at all.
NO_MODEL_LIST = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND)


class ProbeError(ProxyError): ...


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
        await self._get("/health")

    async def metrics(self) -> bytes:
        _, page = await self._get("/metrics")
        return page

    async def served_models(self) -> Models:
        """Return the models of /v1/models; empty if the worker refuses to list them."""
        status, body = await self._get("/v1/models", NO_MODEL_LIST)
        return {} if status in NO_MODEL_LIST else read_models(body)

    async def post(self, path: str, body: bytes, request_id: bytes) -> Answer:
        return await self._in_time(
            f"POST {path}", self._asker.post(path, body, request_id, MAX_PAGE_BYTES)
        )

    async def _get(self, path: str, allowed: Collection[int] = ()) -> Answer:
        response = await self._in_time(f"GET {path}", self._asker.get(path, MAX_PAGE_BYTES))
        if (status := response[0]) != HTTPStatus.OK and status not in allowed:
            raise ProbeError(f"GET {path}: status {status}")
        return response

    async def _in_time(self, what: str, request: Coroutine[Any, Any, Answer]) -> Answer:
        try:
            async with asyncio.timeout(self.timeout_s):
                return await request
        except TimeoutError:
            raise SilentError(f"{what}: no response in time") from None
        except (ProbeResponseError, TlsError, OSError, ValueError) as error:
            raise ProbeError(f"{what}: {str(error) or type(error).__name__}") from None


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
