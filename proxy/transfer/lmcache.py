"""LMCache: a cache that workers share, or into which prefill workers push for one decode worker.

Shared, neither leg says anything: the decode worker finds the prompt by its tokens' hashes. Where
`transfer.addresses` says on which ports a decode worker receives, the prefill leg names them, and
the prefill worker pushes there. Nothing is single-use or has to be freed: it is a cache.
"""

from __future__ import annotations

from proxy.transfer.types import NOTHING, PARAMS, Connector, Fields, Pair, text


class LMCache(Connector):
    """See the module's text."""

    name = "lmcache"
    needs_params = False
    connects = False
    names_decode = True

    def prefill(self, pair: Pair) -> Fields:
        """Name the receiver, if the decode worker is one."""
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
        return {PARAMS: text({"disagg_spec": receiver})}
