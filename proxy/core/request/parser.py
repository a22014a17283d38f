"""Parse a request's body into a `RequestInfo`."""

from __future__ import annotations

from math import inf
from typing import Any

import orjson

from proxy.core.fleet.pool import Pool
from proxy.core.fleet.roster import Roster
from proxy.core.fleet.worker import Worker
from proxy.core.learned.prefix_index import COVERED
from proxy.core.model import refusals
from proxy.core.model.route_table import PromptFields, Route
from proxy.core.model.types import Refusal, RequestInfo
from proxy.core.request.client_fields import (
    ARGUMENTS,
    ID,
    INTERVAL,
    OPTIONS,
    PREVIOUS,
    PRIORITY,
    SALT,
    WITH_ARGUMENTS,
    WITH_OPTIONS,
    WITH_PRIORITY,
    WITH_SALT,
    WITH_USAGE,
    ClientFields,
    find_forbidden,
    find_forbidden_in_form,
    find_repeated,
    has_usage_option,
    is_true,
    salt_in,
)
from proxy.core.request.json_body import LargeBody, parsed
from proxy.core.request.json_edit import check
from proxy.core.request.json_limits import LARGE_BODY_BYTES, JsonMask
from proxy.core.request.multipart import form_fields, plain_model
from proxy.core.request.response_owners import ResponseOwners
from proxy.core.request.session_key import id_in_body, previous_response, session_key
from proxy.core.request.sizing import CUT, Sizer, fit, use_known_prefix
from proxy.core.request.split_check import why_not_split
from proxy.core.request.token_estimate import parse_count
from proxy.core.tenants.tenants import Rank, Tenant

# The key that starts the prompt. Quotes inside JSON strings are escaped, so only a key matches, or
# a harmless string of that text.
PROMPT_KEYS = {
    PromptFields.CHAT: b'"messages"',
    PromptFields.PROMPT: b'"prompt"',
    PromptFields.RESPONSE: b'"input"',
    PromptFields.TOKENS: b'"token_ids"',
}
PROMPT_NAMES = {shape: key[1:-1].decode() for shape, key in PROMPT_KEYS.items()}
# Aliases: Python 3.11 looks up an enum member ten times slower.
EMPTY, FORM, RESPONSE, PROMPT = (
    PromptFields.EMPTY,
    PromptFields.FORM,
    PromptFields.RESPONSE,
    PromptFields.PROMPT,
)
OPAQUE = PromptFields.OPAQUE
KEYS_BEFORE = (b'"tools"', b'"system"', b'"instructions"')
MIN_BYTES_BEFORE = 40  # bytes; no other key fits before
MAX_BYTES_AFTER = 65_536  # that are searched for the field after the prompt
CLOSING, MAX_CLOSING_BYTES = b'"]}, \t\r\n', 64
MAX_COUNTED_BYTES = 65_536  # longer bodies are not sent to /tokenize
MAX_JUDGED_BYTES = 4 * MAX_COUNTED_BYTES  # unless the estimate would refuse them
UNCLEAR_FORM = "The form must have exactly one `model` field, and one plain quoted name per part."
BATCH = Rank.BATCH
# The workers' `priority` per class: lower is more urgent, the default is 0.
PRIORITIES = {Rank.INTERACTIVE: b"-1", BATCH: b"1"}


class RequestParser:
    def __init__(self, roster: Roster, sizer: Sizer, short_limit: int) -> None:
        self.short_limit = short_limit
        self.splits = False  # requests may be handed over
        self.may = ClientFields()
        self.passes_priority = False  # workers get the class
        self.cuts_output = False  # the largest worker may cut output that fits no worker
        self._roster = roster
        self._sizer = sizer
        self.stored = ResponseOwners()

    def read(
        self,
        route: Route,
        body: bytes | LargeBody,
        content_type: bytes,
        request_id: str,
        tenant: Tenant | None,
        session: bytes,
        *,
        hashed: bool,
        batch: bool = False,
        deadline: float = inf,
    ) -> RequestInfo | Refusal:
        """Parse a body, or refuse it.

        `batch`: use the batch class. `session`: its id in the headers. `deadline`: the client's.
        """
        large: LargeBody | None = None
        if isinstance(body, LargeBody):
            large, body = body, body.mask.text
        shape = route.shape
        tenants = tenant is not None
        mask: JsonMask | None = None
        if shape is EMPTY:
            return self._read_by_id(route, request_id, tenant)
        if shape is FORM:
            if named := find_forbidden_in_form(body, content_type, tenants=tenants, may=self.may):
                return refusals.forbidden_field(named)
            fields: Any = form_fields(body, content_type)
            if tenant is not None and tenant.spec.models is not None:
                fields["model"] = plain_model(body, content_type)
                if not fields["model"]:
                    return refusals.bad_request(UNCLEAR_FORM, "model")
        else:
            if large is None and len(body) > LARGE_BODY_BYTES:
                large = LargeBody(body)
            if large is not None:
                while large.advance():
                    pass
                if large.excess:
                    return refusals.bad_request(f"The body has more than {large.excess}.")
                mask = large.mask
            try:
                fields = parsed(body) if large is None else large.fields()
            except orjson.JSONDecodeError as error:
                return refusals.bad_request(f"The body is not JSON: {error}")
            if type(fields) is not dict:
                return refusals.bad_request("The body must be a JSON object.")
            if named := find_forbidden(fields, body, tenants=tenants, may=self.may):
                return refusals.forbidden_field(named)
            if named := find_repeated(fields, body):
                return refusals.duplicate_field(named)
        model = fields.get("model")
        if type(model) is not str or not self._roster.serves(model):
            model = self._only_model(model, tenant)
            if isinstance(model, Refusal):
                return model
        if tenant is not None and not tenant.may_use(model):
            return refusals.not_allowed(model, self._known(tenant))
        ask = self._sizer.estimate(route, model, fields, len(body), request_id, tenant)
        ask.deadline = deadline
        ask.takes_arguments = ask.route in WITH_ARGUMENTS and ARGUMENTS not in fields
        if batch:
            ask.rank = BATCH
        elif tenant is not None:
            ask.rank = tenant.spec.rank
        if tenant is not None:
            if (refusal := self._apply_tenant(ask, tenant, fields, shape)) is not None:
                return refusal
        elif SALT in fields:
            ask.salt = salt_in(fields)
        if hashed:
            if parse_count(fields.get(CUT)) is None:  # keeps the beginning
                self._hash(ask, shape, fields, body)
            if ask.generates:
                _name_session(ask, shape, fields, session)
        if shape is RESPONSE and (previous := fields.get(PREVIOUS)) is not None:
            ask.pinned = self._find_holder(previous, tenant)
            if tenant is not None and not ask.pinned:
                return refusals.no_response(str(previous))
            self._add_stored(ask)
        ask.long = ask.expected_tokens > self.short_limit
        self._fit(ask)
        if self.splits:
            ask.whole = ask.whole or why_not_split(ask, fields)
            ask.least_output = "min_tokens" in fields
            if not ask.whole:
                ask.field_names = _member_names(fields, ask.fields)
        if ask.fields is not None or (self.splits and not ask.whole):
            found = check(body, mask)  # it will be edited
            if found is not None and (changed := ask.fields) is not None:
                names = {name.encode() for name in changed}
                ask.found = [member for member in found if member.name in names]
        return ask

    def _apply_tenant(
        self, ask: RequestInfo, tenant: Tenant, fields: dict[str, Any], shape: PromptFields
    ) -> Refusal | None:
        """Set the tenant and the members that the router edits."""
        ask.tenant = tenant
        changed: dict[str, bytes | None] = {ID: None} if ID in fields else {}
        if tenant.spec.models is not None:  # workers default to their own model
            changed["model"] = orjson.dumps(ask.model)
        if not self.may.priority:
            if PRIORITY in fields:
                changed[PRIORITY] = None
            if self.passes_priority and ask.route in WITH_PRIORITY and ask.rank in PRIORITIES:
                changed[PRIORITY] = PRIORITIES[ask.rank]
        if INTERVAL in fields:
            changed[INTERVAL] = None
        if ask.stream:
            # Beam search streams nothing before its end.
            ask.stream = not is_true(fields.get("use_beam_search"))
            if ask.route in WITH_OPTIONS and not has_usage_option(fields):
                changed[OPTIONS] = WITH_USAGE
        own = salt_in(fields) if SALT in fields else ""
        if not tenant.spec.salted and not (own and tenant.beside_salted):
            ask.salt = own
        elif ask.route in WITH_SALT:
            ask.salt = tenant.salt(own)
            changed[SALT] = b'"%b"' % ask.salt.encode()
        elif tenant.spec.salted and shape is not OPAQUE and shape is not FORM:
            return refusals.not_isolated(ask.route)
        if changed and shape is not FORM:
            ask.fields = changed
        return None

    def _known(self, tenant: Tenant | None) -> list[str]:
        known = self._roster.models()
        return [name for name in known if tenant is None or tenant.may_use(name)]

    def _only_model(self, named: object, tenant: Tenant | None) -> str | Refusal:
        """Return the fleet's only model if the body names none, as in vLLM."""
        known = self._known(tenant)
        if named is None or named == "":
            if len(known) == 1:
                return known[0]
            return refusals.bad_request("The body must name a `model`.", "model")
        if type(named) is str:
            return refusals.model_not_served(
                named, known, all_listed=self._roster.all_listed(named)
            )
        return refusals.bad_request("`model` must be a string.", "model")

    def _read_by_id(
        self, route: Route, request_id: str, tenant: Tenant | None
    ) -> RequestInfo | Refusal:
        """Pin a request to the worker that stores its response.

        Without a known owner, the response may be another tenant's, so it is refused.
        """
        holder = self._find_holder(route.response_id, tenant)
        if tenant is not None and not holder:
            return refusals.no_response(route.response_id)
        roster = self._roster
        worker, models = roster.get(holder), roster.models()
        live = (model for model in models if roster.pool(model).all)
        model = worker.model if worker else next(live, next(iter(models), ""))
        ask = self._sizer.estimate(route, model, {}, 0, request_id, tenant)
        ask.pinned = holder
        if tenant is not None:
            ask.tenant, ask.rank = tenant, tenant.spec.rank
        return ask

    def _find_holder(self, response_id: object, tenant: Tenant | None) -> str:
        if type(response_id) is not str:
            return ""
        holder = self.stored.find_worker(response_id, tenant)
        return holder if holder in self._roster else ""

    def _add_stored(self, ask: RequestInfo) -> None:
        """Add the tokens of the stored response that a request continues.

        A worker may leave some of them out, so they refuse no request.
        """
        session, worker = self._roster.sessions.get(ask.session), self._roster.get(ask.pinned)
        if session is None or worker is None:
            return
        if tokens := session.tokens_on(worker.index, worker.up_since):
            ask.stored_tokens = tokens
            ask.prompt_tokens += tokens
            ask.largest_prompt += tokens
            ask.prompt_error += tokens
            ask.prefix = ()  # the body is the prompt's end
            ask.long = ask.expected_tokens > self.short_limit

    def _hash(
        self, ask: RequestInfo, shape: PromptFields, fields: dict[str, Any], body: bytes
    ) -> None:
        start = prompt_start(shape, body)
        if start >= 0:
            scope = f"{ask.model}\n{ask.salt}" if ask.salt else ask.model
            if ask.tool_bytes and body.startswith(PROMPT_KEYS[shape], start):
                ask.bytes_before = ask.tool_bytes
                scope += f"\n\n{ask.tool_bytes}"
            prefixes, end = self._roster.prefixes, prompt_end(shape, fields, body, start)
            ask.prefix = prefixes.hashes(scope, body, start, end)
            ask.prefix_bytes = end - start
            blocks, tokens = prefixes.reported_prefix(ask.prefix)
            if blocks and ask.text_bytes and not ask.counted and ask.prompts == 1:
                use_known_prefix(ask, tokens, ask.bytes_before + COVERED[blocks])

    def counter_for(self, ask: RequestInfo, *, by_size: bool) -> Worker | None:
        """Return the worker to count an ask's tokens; None if the estimate suffices."""
        if not ask.countable or ask.counted:
            return None
        pool, tenant = self._roster.pool(ask.model), ask.tenant
        near = ask.body_bytes <= MAX_COUNTED_BYTES and self._is_near(ask, pool, by_size=by_size)
        if not near and (tenant is None or not _would_be_refused(ask, tenant)):
            return None
        healthy = (worker for worker in pool.members if not worker.is_barred)
        return min(healthy, key=lambda worker: (worker.requests, worker.index), default=None)

    def _is_near(self, ask: RequestInfo, pool: Pool, *, by_size: bool) -> bool:
        """Return whether the exact count may change the routing."""
        error = ask.prompt_error
        if by_size and pool.mixed and abs(ask.expected_tokens - self.short_limit) <= error:
            return True
        needs = ask.needed_context
        for limit in pool.boundaries:  # noqa: SIM110 - usually empty
            if abs(needs - limit) <= error:
                return True
        return False

    def apply_count(self, ask: RequestInfo, prompt_tokens: int) -> None:
        self._sizer.apply_count(ask, prompt_tokens)
        self._fit(ask)
        ask.long = ask.expected_tokens > self.short_limit

    def _fit(self, ask: RequestInfo) -> None:
        pinned = self._roster.get(ask.pinned) if ask.pinned else None
        most = self._roster.pool(ask.model).limit if pinned is None else pinned.limit
        if ask.needed_context > most:
            fit(ask, most, cuts_output=self.cuts_output)


def _name_session(
    ask: RequestInfo, shape: PromptFields, fields: dict[str, Any], session_id: bytes
) -> None:
    if not session_id:
        session_id = id_in_body(fields)
    if not session_id and shape is RESPONSE:
        ask.chained = True
        session_id = previous_response(fields)
    if session_id:
        owner = "" if ask.tenant is None else ask.tenant.name
        ask.session = session_key(owner, ask.model, session_id)


def _member_names(
    fields: dict[str, Any], changed: dict[str, bytes | None] | None
) -> frozenset[str]:
    if changed is None:
        return frozenset(fields)
    added = {name for name, text in changed.items() if text is not None}
    return frozenset((fields.keys() - changed.keys()) | added)


def _would_be_refused(ask: RequestInfo, tenant: Tenant) -> bool:
    """Return whether an estimate alone would refuse a prompt by its tenant's limit.

    No worker checks that limit.
    """
    most = tenant.spec.limits.max_prompt_tokens
    if most is None or ask.body_bytes > MAX_JUDGED_BYTES:
        return False
    return ask.least_prompt <= most < ask.min_prompt_size


def prompt_start(shape: PromptFields, body: bytes) -> int:
    """Return the prompt's start; -1 if prefixes do not apply."""
    key = PROMPT_KEYS.get(shape)
    if key is None:
        return -1
    start = body.find(key)
    if start > MIN_BYTES_BEFORE and shape is not PROMPT:
        for before in KEYS_BEFORE:  # templates put tools and system first
            found = body.find(before, 0, start)
            if found >= 0:
                start = found
    return start


def prompt_end(shape: PromptFields, fields: dict[str, Any], body: bytes, start: int) -> int:
    """Return the prompt's end, before the brackets that a longer prompt has further on."""
    key, names, end = PROMPT_NAMES[shape], [*fields], len(body)
    following = names.index(key) + 1 if key in fields else len(names)
    if following < len(names) and names[following].isascii():
        last = max(start, end - MAX_BYTES_AFTER)
        found = body.rfind(b'"' + names[following].encode() + b'"', last)
        end = found if found >= 0 else end
    closing = body[max(start, end - MAX_CLOSING_BYTES) : end]
    return end - len(closing) + len(closing.rstrip(CLOSING))
