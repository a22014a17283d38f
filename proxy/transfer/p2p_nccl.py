"""P2P NCCL: both workers find each other in the request's id, and need nothing else.

    ___prefill_addr_10.0.0.1:21001___decode_addr_10.0.0.2:22001_<unique>

vLLM had it until 0.31. The addresses are those of the connector, not of HTTP: `transfer.addresses`
has them. An id of this kind that a client sends is never passed on (see `is_steering`).
"""

from __future__ import annotations

from proxy.core.request.client_fields import ADDRESSES
from proxy.transfer.types import Connector, Pair


class P2pNccl(Connector):
    """See the module's text."""

    name = "p2p-nccl"
    needs_params = False
    names_decode = True

    def request_id(self, pair: Pair) -> bytes | None:
        """Write both addresses into the id; of one that joined since nothing is known."""
        where = self.config.addresses
        prefill, decode = where.get(pair.prefill.name), where.get(pair.decode.name)
        if prefill is None or decode is None:
            return None
        return f"___prefill_addr_{prefill}___decode_addr_{decode}_{pair.id}".encode()


def is_steering(request_id: bytes) -> bool:
    """Whether a worker with this connector would take addresses from an id."""
    return any(mark in request_id for mark in ADDRESSES)
