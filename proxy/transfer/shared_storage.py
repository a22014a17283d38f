"""Shared storage: vLLM's ExampleConnector, which writes KV caches to files under a common folder.

The decode worker finds them by the hash of the prompt's tokens, so neither leg says anything, and
nothing is single-use or has to be freed. Nobody ever deletes the files: for trials.
"""

from __future__ import annotations

from proxy.transfer.types import Connector


class SharedStorage(Connector):
    """See the module's text."""

    name = "shared-storage"
    needs_params = False
    connects = False
