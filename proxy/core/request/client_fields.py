"""The fields and headers that clients may not set; all others pass unchanged.

Always: `previous_response_id` and `cache_salt` more than once: 400, as parsers differ. Other
duplicates: the last counts, as in vLLM.

Unless `router.allow_client_kv_transfer`:

- `kv_transfer_params`, `ec_transfer_params`: 400 (see `find_steering`).
- A `request_id` with addresses, which vLLM's MoRIIO connector reads: 400; `X-Request-Id`: replaced.

With tenants:

- `vllm_xargs`, `sampling_params.extra_args`: 400; engine policies read them (*).
- `priority`: set to the tenant's class, or removed (*).
- `model`: set for a tenant with restricted models; a form must name one (`multipart`).
- `stream_interval`: removed; early disconnects are charged by events.
- `stream_options`: the router requests usage and hides it (`response_writer`).
- `request_id`: removed; it could name another tenant's response.
- `cache_salt`: combined with an isolated tenant's own.
- `X-Vllm-Priority`, `X-Data-Parallel-Rank`: removed; they override the router.
- `Endpoint-Load-Metrics-Format`: removed; it reveals the load of others.
- `Authorization`, `Api-Key`, `X-Api-Key`: removed; they are for the router.

(*) unless `router.client_fields` allows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from proxy.core.request.json_edit import count_members, members
from proxy.core.request.kv_transfer_fields import (
    TREE,
    Tree,
    find_steering,
    find_steering_in_form,
)

PRIORITY, ARGUMENTS, SALT, ID = "priority", "vllm_xargs", "cache_salt", "request_id"
BACKGROUND = "background"
INTERVAL, OPTIONS = "stream_interval", "stream_options"
PREVIOUS = "previous_response_id"
ONCE = (PREVIOUS, SALT)
# In a request id, a worker's address follows these.
ADDRESSES = (b"___prefill_addr_", b"___decode_addr_")
MAX_SALT_LENGTH = 128
WITH_USAGE = b'{"include_usage":true}'
TRUE = frozenset(["true", "t", "yes", "y", "on", "1", "1.0"])
NO_ARGUMENTS: Tree = {ARGUMENTS.encode(): None}
STRICT: Tree = {**TREE, **NO_ARGUMENTS, b"sampling_params": {b"extra_args": None}}

HEADERS = (b"x-vllm-priority", b"x-data-parallel-rank", b"endpoint-load-metrics-format")
KEYS = (b"api-key", b"x-api-key")


class ClientFields(NamedTuple):
    kv_transfer: bool = False
    priority: bool = False
    arguments: bool = False


def find_forbidden(
    fields: Mapping[str, Any], body: bytes, *, tenants: bool, allowed: ClientFields
) -> str:
    """Return the first forbidden member of a JSON body, or ""."""
    if ID in fields and not allowed.kv_transfer and _id_names_addresses(body):
        return ID
    strict = tenants and not allowed.arguments
    if allowed.kv_transfer:
        return (find_steering(fields, body, NO_ARGUMENTS) if strict else "") or ""
    return find_steering(fields, body, STRICT if strict else TREE) or ""


def find_repeated(fields: Mapping[str, Any], body: bytes) -> str:
    for name in ONCE:
        if name in fields and count_members(body, name) > 1:
            return name
    return ""


def _id_names_addresses(body: bytes) -> bool:
    fields = (member for member in members(body) if member.name == ID.encode())
    ids = (body[field.value : field.end] for field in fields)
    # An escape may hide an address.
    return any(b"\\" in text or has_address(text) for text in ids)


def has_address(request_id: bytes) -> bool:
    """Return whether a worker with the MoRIIO connector would read an address from a request id."""
    return any(mark in request_id for mark in ADDRESSES)


def find_forbidden_in_form(
    body: bytes, content_type: bytes, *, tenants: bool, allowed: ClientFields
) -> str:
    strict = tenants and not allowed.arguments
    if allowed.kv_transfer and not strict:
        return ""
    return find_steering_in_form(body, content_type, no_arguments=strict) or ""


def salt_in(fields: Mapping[str, Any]) -> str:
    """Return the client's salt; "" if a worker would refuse it."""
    own = fields.get(SALT)
    return own[:MAX_SALT_LENGTH] if type(own) is str else ""


def is_true(value: object) -> bool:
    """Return whether a worker reads a value as true."""
    return value is True or (type(value) in (str, int, float) and str(value).lower() in TRUE)


def has_usage_option(fields: Mapping[str, Any]) -> bool:
    """Return whether a client requests usage, or has options that a worker refuses."""
    options = fields.get(OPTIONS)
    if options is None:
        return False
    return type(options) is not dict or is_true(options.get("include_usage"))
