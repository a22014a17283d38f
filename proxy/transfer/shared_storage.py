"""Shared storage: vLLM's ExampleConnector, which writes KV caches to files in a shared folder.

The decode worker finds the files by the hash of the prompt's tokens, so neither leg has parameters.
Files can be read many times and are never deleted. Use this connector for trials only.
"""

from __future__ import annotations

from proxy.transfer.types import Connector


class SharedStorage(Connector):
    name = "shared-storage"
    needs_params = False
    connects = False
