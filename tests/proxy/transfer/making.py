"""Connectors and pairs for tests."""

from __future__ import annotations

from typing import Any

import orjson

from proxy.config import TransferConfig
from proxy.transfer.registry import connector
from proxy.transfer.types import Connector, Fields, Pair, Side

PAIR = Pair(Side("p0", "10.0.0.1"), Side("d0", "10.0.0.2"), "one-of-a-kind")


def make(name: str, **settings: Any) -> Connector:
    return connector(TransferConfig.model_validate({"connector": name, **settings}))


def params(fields: Fields) -> Any:
    return orjson.loads(fields["kv_transfer_params"] or b"null")
