"""The fleet file: what it may say, how it is read, and all that can be wrong with it."""

from proxy.config.checks import Check, Draft
from proxy.config.models import (
    AdminConfig,
    FleetConfig,
    LaunchConfig,
    ProbeConfig,
    QueueConfig,
    RetryConfig,
    RouterConfig,
    RoutingConfig,
    TimeoutConfig,
    WorkerConfig,
)
from proxy.config.reading import load, parse
from proxy.config.showing import shown

__all__ = [
    "AdminConfig",
    "Check",
    "Draft",
    "FleetConfig",
    "LaunchConfig",
    "ProbeConfig",
    "QueueConfig",
    "RetryConfig",
    "RouterConfig",
    "RoutingConfig",
    "TimeoutConfig",
    "WorkerConfig",
    "load",
    "parse",
    "shown",
]
