"""The KV connectors by name."""

from __future__ import annotations

from proxy.config import TransferConfig
from proxy.transfer.lmcache import LMCache
from proxy.transfer.mooncake import Mooncake
from proxy.transfer.nixl import Nixl
from proxy.transfer.shared_storage import SharedStorage
from proxy.transfer.types import Connector

CONNECTORS: dict[str, type[Connector]] = {
    kind.name: kind for kind in (Nixl, SharedStorage, Mooncake, LMCache)
}


def connector(config: TransferConfig) -> Connector:
    return CONNECTORS[config.connector](config)
