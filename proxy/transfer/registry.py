"""The connectors by name."""

from __future__ import annotations

from proxy.config import TransferConfig
from proxy.transfer.lmcache import LMCache
from proxy.transfer.mooncake import Mooncake
from proxy.transfer.nixl import Nixl
from proxy.transfer.p2p_nccl import P2pNccl
from proxy.transfer.shared_storage import SharedStorage
from proxy.transfer.types import Connector

CONNECTORS: dict[str, type[Connector]] = {
    each.name: each for each in (Nixl, SharedStorage, Mooncake, LMCache, P2pNccl)
}


def connector(config: TransferConfig) -> Connector:
    """Make the connector that a fleet file names."""
    return CONNECTORS[config.connector](config)
