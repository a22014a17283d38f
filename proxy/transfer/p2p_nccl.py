"""P2P NCCL: the request id has the addresses of both workers, and there are no parameters.

    ___prefill_addr_10.0.0.1:21001___decode_addr_10.0.0.2:22001_<unique>

vLLM has this connector up to 0.31. The addresses come from `transfer.addresses`; they are not those
of the HTTP servers. A client's id of this kind is never passed on (see `is_steering`).
"""

from __future__ import annotations

from proxy.core.request.client_fields import ADDRESSES
from proxy.transfer.types import Connector, Pair


class P2pNccl(Connector):
    """The P2P NCCL connector."""

    name = "p2p-nccl"
    needs_params = False
    names_decode = True

    def request_id(self, pair: Pair) -> bytes | None:
        """Return an id with both addresses; None if a worker has no address in the fleet file."""
        addresses = self.config.addresses
        prefill, decode = addresses.get(pair.prefill.name), addresses.get(pair.decode.name)
        if prefill is None or decode is None:
            return None
        return f"___prefill_addr_{prefill}___decode_addr_{decode}_{pair.id}".encode()


def is_steering(request_id: bytes) -> bool:
    """Return whether a worker with this connector would read addresses from a request id."""
    return any(mark in request_id for mark in ADDRESSES)
