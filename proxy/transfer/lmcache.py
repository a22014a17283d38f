"""LMCache: a cache that workers share, or that prefill workers push into a decode worker.

With a shared cache, neither leg has parameters: the decode worker finds the prompt by its tokens'
hashes. If `transfer.addresses` has a decode worker's ports, the prefill leg names them. Blocks can
be read many times and need no release.
"""

from __future__ import annotations

from proxy.transfer.types import NOTHING, PARAMS, Connector, Fields, Pair, json_bytes


class LMCache(Connector):
    name = "lmcache"
    needs_params = False
    connects = False
    names_decode = True

    def prefill(self, pair: Pair) -> Fields:
        address = self.config.addresses.get(pair.decode.name)
        if address is None:
            return NOTHING
        host, init_port, alloc_port = address.rsplit(":", 2)
        receiver = {
            "req_id": pair.id,
            "receiver_host": host,
            "receiver_init_port": [int(init_port)],
            "receiver_alloc_port": [int(alloc_port)],
        }
        return {PARAMS: json_bytes({"disagg_spec": receiver})}
