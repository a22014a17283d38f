"""What a client may not say, in one place. All else passes as it was written.

For every fleet:

- `previous_response_id` and `cache_salt` more than once: 400. They name what a worker stores, and
  parsers differ in which of two members they keep. Of other members the last one counts, here as in
  vLLM; a member that the router sets or takes out is set or taken out everywhere.

For every fleet, unless `router.allow_client_kv_transfer`:

- `kv_transfer_params` and `ec_transfer_params`, wherever an engine reads them from: 400. They steer
  transfers between workers: see `steering`.
- An `X-Request-Id` that names addresses is replaced, and a body's `request_id` that does so is
  refused: one connector would connect to them.

Where there are tenants:

- `vllm_xargs`, in a form too, and `sampling_params.extra_args`: 400. Policies and plugins of the
  engine read them, `lane` among others; unless `router.client_fields` has `vllm_xargs`.
- `priority`: taken out, and the tenant's class is put there if the workers heed it; unless
  `router.client_fields` has `priority`.
- `model`, where the tenant may not use all: the one it was judged by is put into a JSON body, and a
  form has to name one so that no two parsers differ (`forms`). Workers take their own for none.
- `stream_interval`: taken out. What is left early is charged by its events and its time.
- `stream_options`: where a stream's usage isn't asked for, the router asks for it and keeps it back
  (`wire/answering`): events are not tokens, and a tenant pays for tokens.
- `request_id` in the body: taken out. Stored responses go by it, and it could be another tenant's.
- `cache_salt`: passes; where any tenant's caches are isolated, it becomes a part of its own
  tenant's: or else it could be another's.
- `X-Vllm-Priority` and `X-Data-Parallel-Rank` stay behind, for they overrule the router; so does
  `Endpoint-Load-Metrics-Format`, which asks how busy others keep a worker.
- `Authorization`, `Api-Key`, `X-Api-Key` stay behind: they are for the router.

Without tenants all who come are one, who may order among themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from proxy.core.model.route_table import route_names
from proxy.core.request.json_edit import members, times
from proxy.core.request.kv_transfer_fields import TREE, Tree, find, steering, steering_form

PRIORITY, ARGUMENTS, SALT, ID = "priority", "vllm_xargs", "cache_salt", "request_id"
INTERVAL, OPTIONS = "stream_interval", "stream_options"
PREVIOUS = "previous_response_id"
ONCE = (PREVIOUS, SALT)
# In an id, these are followed by the addresses that the p2p-nccl connector is to use.
ADDRESSES = (b"___prefill_addr_", b"___decode_addr_")
WITH_PRIORITY = route_names(lambda route: route.takes_priority)
# A body without room for a salt can't keep its cached prefix apart.
WITH_SALT = route_names(lambda route: route.salted)
LONGEST_SALT = 128
# Other streams have usage in any case, or never.
WITH_OPTIONS = route_names(lambda route: route.usage_by_option)
WITH_USAGE = b'{"include_usage":true}'
TRUE = frozenset(["true", "t", "yes", "y", "on", "1", "1.0"])
STRICT: Tree = {**TREE, ARGUMENTS.encode(): None, b"sampling_params": {b"extra_args": None}}

HEADERS = (b"x-vllm-priority", b"x-data-parallel-rank", b"endpoint-load-metrics-format")
KEYS = (b"api-key", b"x-api-key")


class ClientFields(NamedTuple):
    """What the operator lets clients say."""

    kv_transfer: bool = False
    priority: bool = False
    arguments: bool = False


def forbidden(fields: Mapping[str, Any], body: bytes, *, tenants: bool, may: ClientFields) -> str:
    """Name what a JSON body says that is not taken from clients; empty if nothing."""
    if ID in fields and not may.kv_transfer and _id_names_addresses(body):
        return ID
    if not tenants or may.arguments:
        return ("" if may.kv_transfer else steering(fields, body)) or ""
    if (
        ARGUMENTS in fields
        or "kv_transfer_params" in fields
        or "ec_transfer_params" in fields
        or ("sampling_params" in fields and (b"extra_args" in body or b"\\" in body))
    ):
        return find(body, {ARGUMENTS.encode(): None} if may.kv_transfer else STRICT) or ""
    return ""


def repeated(fields: Mapping[str, Any], body: bytes) -> str:
    """Name a member of `ONCE` that a JSON body has more than once; empty if there is none."""
    said = [name for name in ONCE if name in fields]
    return next((name for name in said if times(body, name) > 1), "")


def _id_names_addresses(body: bytes) -> bool:
    ids = (body[each.value : each.end] for each in members(body) if each.name == ID.encode())
    # Who escapes letters of an id means to hide something.
    return any(b"\\" in one or any(mark in one for mark in ADDRESSES) for one in ids)


def forbidden_form(body: bytes, content_type: bytes, *, tenants: bool, may: ClientFields) -> str:
    """Name what a form says that is not taken from clients; empty if nothing."""
    strict = tenants and not may.arguments
    if may.kv_transfer and not strict:
        return ""
    return steering_form(body, content_type, at_all=strict) or ""


def salt_in(fields: Mapping[str, Any]) -> str:
    """Read the salt that a client gave; what a worker would refuse is none."""
    own = fields.get(SALT)
    return own[:LONGEST_SALT] if type(own) is str else ""


def is_true(value: object) -> bool:
    """Whether a worker takes a value for true: its parser is not strict."""
    return value is True or (type(value) in (str, int, float) and str(value).lower() in TRUE)


def tells_usage(fields: Mapping[str, Any]) -> bool:
    """Whether a client asked for a stream's usage, or so that a worker will refuse it."""
    options = fields.get(OPTIONS)
    if options is None:
        return False
    return type(options) is not dict or is_true(options.get("include_usage"))
