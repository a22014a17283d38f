"""The fleet file: its blocks, how it is read, and the checks of its values."""

from proxy.config.admin import AdminConfig
from proxy.config.batches import BatchesConfig
from proxy.config.fleet_file import (
    FleetConfig,
    JournalConfig,
    ProbeConfig,
    RouterConfig,
    RoutingConfig,
    TransferConfig,
)
from proxy.config.load import load, parse
from proxy.config.partial import Check, PartialConfig
from proxy.config.redact import shown
from proxy.config.tenants import TenantConfig
from proxy.config.tls import TlsConfig, WorkerTlsConfig
from proxy.config.workers import (
    DiscoveryConfig,
    KubernetesConfig,
    LaunchConfig,
    PoolConfig,
    WorkerConfig,
)

__all__ = [
    "AdminConfig",
    "BatchesConfig",
    "Check",
    "DiscoveryConfig",
    "FleetConfig",
    "JournalConfig",
    "KubernetesConfig",
    "LaunchConfig",
    "PartialConfig",
    "PoolConfig",
    "ProbeConfig",
    "RouterConfig",
    "RoutingConfig",
    "TenantConfig",
    "TlsConfig",
    "TransferConfig",
    "WorkerConfig",
    "WorkerTlsConfig",
    "load",
    "parse",
    "shown",
]
