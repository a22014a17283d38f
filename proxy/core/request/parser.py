"""Parse a request's body into a `RequestInfo`."""

from __future__ import annotations

from typing import Any

import orjson

from proxy.core.fleet.pool import Pool
from proxy.core.fleet.roster import Roster
from proxy.core.fleet.worker import Worker
from proxy.core.learned.prefix_index import COVERED
from proxy.core.model import refusals
from proxy.core.model.refusals import RefusedError
from proxy.core.model.route_table import PromptFields, Route
from proxy.core.model.settings import RouterSettings
from proxy.core.model.types import ReceivedRequest, RequestInfo
from proxy.core.request.client_fields import (
    ARGUMENTS,
    BACKGROUND,
    ID,
    INTERVAL,
    OPTIONS,
    PREVIOUS,
    PRIORITY,
    SALT,
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
from proxy.core.request.json_edit import check_members
from proxy.core.request.json_limits import LARGE_BODY_BYTES, JsonMask
from proxy.core.request.multipart import form_fields, plain_model
from proxy.core.request.response_owners import ResponseOwners, UnknownOwnerError
from proxy.core.request.session_key import id_in_body, previous_response, session_key
from proxy.core.request.sizing import CUT, Sizer, shrink_to_fit, use_known_prefix
from proxy.core.request.split_check import why_not_split
from proxy.core.request.token_estimate import parse_count
from proxy.core.tenants.tenants import Rank, Tenant, allowed_models

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
NEVER_SALTED = frozenset([FORM, PromptFields.OPAQUE])  # accepted from isolated tenants too
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
    def __init__(self, roster: Roster, sizer: Sizer, settings: RouterSettings) -> None:
        self.stored = ResponseOwners()
        self._roster = roster
        self._sizer = sizer
        self.reconfigure(settings)

    def reconfigure(self, settings: RouterSettings) -> None:
        self._settings, self._short_limit = settings, settings.short_limit
        self._allowed = ClientFields(
            settings.allow_client_kv_transfer, settings.client_priority, settings.client_arguments
        )

    def read(self, request: ReceivedRequest, *, hashed: bool) -> RequestInfo:
        """Return what a request needs, or raise `RefusedError`.

        `hashed`: its cached prefix and its session decide the routing.
        """
        route, tenant = request.route, request.tenant
        if route.shape is EMPTY:
            return self._read_by_id(request)
        fields, body, mask = self._parse(request)
        model = self._choose_model(fields.get("model"), tenant)
        info = self._sizer.estimate(route, model, fields, len(body), request.id, tenant)
        info.deadline, info.explain = request.deadline, request.explain
        info.takes_arguments = route.takes_arguments and ARGUMENTS not in fields
        info.asks_usage = info.stream and (not route.usage_by_option or has_usage_option(fields))
        info.in_background = BACKGROUND in fields
        if request.batch:
            info.rank = BATCH
        elif tenant is not None:
            info.rank = tenant.spec.rank
        if tenant is not None:
            self._apply_tenant(info, route, tenant, fields)
        elif SALT in fields:
            info.salt = salt_in(fields)
        if hashed:
            if parse_count(fields.get(CUT)) is None:  # keeps the beginning
                self._hash_prompt(info, route.shape, fields, body)
            if info.generates:
                _name_session(info, route.shape, fields, request.session)
        if route.shape is RESPONSE and (previous := fields.get(PREVIOUS)) is not None:
            info.pinned = self._find_storing_worker(previous, request)
            self._add_stored_tokens(info)
        info.long = info.expected_tokens > self._short_limit
        self._shrink_if_too_long(info)
        if self._settings.transfer:  # requests may be handed over
            _allow_split(info, fields)
        if info.edits is not None or info.field_names is not None:
            _prepare_edits(info, body, mask)
        return info

    def _parse(self, request: ReceivedRequest) -> tuple[dict[str, Any], bytes, JsonMask | None]:
        body, large = request.body, request.large
        if request.route.shape is FORM:
            return self._fields_of_form(request), body, None
        if large is None and len(body) > LARGE_BODY_BYTES:
            large = LargeBody(body)
        fields = _fields_of_json(body, large)
        tenants = request.tenant is not None
        if named := find_forbidden(fields, body, tenants=tenants, allowed=self._allowed):
            raise RefusedError(refusals.forbidden_field(named))
        if named := find_repeated(fields, body):
            raise RefusedError(refusals.duplicate_field(named))
        return fields, body, None if large is None else large.mask

    def _fields_of_form(self, request: ReceivedRequest) -> dict[str, Any]:
        body, kind, tenant = request.body, request.content_type, request.tenant
        tenants = tenant is not None
        if named := find_forbidden_in_form(body, kind, tenants=tenants, allowed=self._allowed):
            raise RefusedError(refusals.forbidden_field(named))
        fields: dict[str, Any] = form_fields(body, kind)
        if tenant is not None and tenant.spec.models is not None:
            fields["model"] = plain_model(body, kind)
            if not fields["model"]:
                raise RefusedError(refusals.bad_request(UNCLEAR_FORM, "model"))
        return fields

    def _choose_model(self, named: object, tenant: Tenant | None) -> str:
        """Return the model that the body names; if it names none, the fleet's only one."""
        if type(named) is str and self._roster.serves(named):
            model = named
        else:
            model = self._only_model(named, tenant)
        if tenant is not None and not tenant.may_use(model):
            raise RefusedError(
                refusals.not_allowed(model, allowed_models(self._roster.models(), tenant))
            )
        return model

    def _only_model(self, named: object, tenant: Tenant | None) -> str:
        models = allowed_models(self._roster.models(), tenant)
        if named is None or named == "":
            if len(models) == 1:
                return models[0]
            raise RefusedError(refusals.bad_request("The body must name a `model`.", "model"))
        if type(named) is not str:
            raise RefusedError(refusals.bad_request("`model` must be a string.", "model"))
        all_listed = self._roster.all_listed(named)
        raise RefusedError(refusals.model_not_served(named, models, all_listed=all_listed))

    def _apply_tenant(
        self, info: RequestInfo, route: Route, tenant: Tenant, fields: dict[str, Any]
    ) -> None:
        """Set the tenant and its salt, and the fields that the router sets or removes."""
        edits = self._edits_for(info, route, tenant, fields)
        info.tenant = tenant
        if info.stream:  # beam search streams nothing before its end
            info.stream = not is_true(fields.get("use_beam_search"))
        own_salt = salt_in(fields) if SALT in fields else ""
        is_isolated = tenant.spec.salted or (own_salt and tenant.beside_salted)
        if not is_isolated:
            info.salt = own_salt
        elif route.salted:
            info.salt = tenant.salt(own_salt)
            edits[SALT] = b'"%b"' % info.salt.encode()
        elif tenant.spec.salted and route.shape not in NEVER_SALTED:
            raise RefusedError(refusals.not_isolated(route.name))
        if edits and route.shape is not FORM:
            info.edits = edits

    def _edits_for(
        self, info: RequestInfo, route: Route, tenant: Tenant, fields: dict[str, Any]
    ) -> dict[str, bytes | None]:
        """Return the fields to set, and with None those to remove; all but the salt."""
        edits: dict[str, bytes | None] = {}
        if ID in fields:
            edits[ID] = None
        if INTERVAL in fields:
            edits[INTERVAL] = None
        if tenant.spec.models is not None:  # workers default to their own model
            edits["model"] = orjson.dumps(info.model)
        if not self._allowed.priority:
            passes = self._settings.pass_priority and route.takes_priority
            priority = PRIORITIES.get(info.rank) if passes else None
            if priority is not None or PRIORITY in fields:
                edits[PRIORITY] = priority
        if info.stream and route.usage_by_option and not info.asks_usage:
            edits[OPTIONS] = WITH_USAGE
        return edits

    def _read_by_id(self, request: ReceivedRequest) -> RequestInfo:
        """Pin a request to the worker that stores its response."""
        roster, route, tenant = self._roster, request.route, request.tenant
        worker_name = self._find_storing_worker(route.response_id, request)
        worker, models = roster.get(worker_name), roster.models()
        live = (model for model in models if roster.pool(model).all)
        model = worker.model if worker else next(live, next(iter(models), ""))
        info = self._sizer.estimate(route, model, {}, 0, request.id, tenant)
        info.pinned, info.explain = worker_name, request.explain
        if tenant is not None:
            info.tenant, info.rank = tenant, tenant.spec.rank
        return info

    def _find_storing_worker(self, response_id: object, request: ReceivedRequest) -> str:
        """Return the name of the worker that stores a response; "" if it is not known.

        Without a known owner, the response may be another tenant's, so a tenant is refused.
        """
        worker_name, tenant = "", request.tenant
        if type(response_id) is str:
            worker_name = self.stored.find_worker(response_id, tenant)
            if not worker_name and request.may_wait:
                raise UnknownOwnerError
        if worker_name in self._roster:
            return worker_name
        if tenant is not None:
            raise RefusedError(refusals.no_response(str(response_id)))
        return ""

    def _add_stored_tokens(self, info: RequestInfo) -> None:
        """Add the tokens of the stored response that a request continues.

        A worker may leave some of them out, so they refuse no request.
        """
        session, worker = self._roster.sessions.get(info.session), self._roster.get(info.pinned)
        if session is None or worker is None:
            return
        if tokens := session.tokens_on(worker.index, worker.up_since):
            info.stored_tokens = tokens
            info.prompt_tokens += tokens
            info.largest_prompt += tokens
            info.prompt_error += tokens
            info.prefix = ()  # the body is the prompt's end

    def _hash_prompt(
        self, info: RequestInfo, shape: PromptFields, fields: dict[str, Any], body: bytes
    ) -> None:
        start = prompt_start(shape, body)
        if start >= 0:
            scope = f"{info.model}\n{info.salt}" if info.salt else info.model
            if info.tool_bytes and body.startswith(PROMPT_KEYS[shape], start):
                info.bytes_before = info.tool_bytes
                scope += f"\n\n{info.tool_bytes}"
            prefixes, end = self._roster.prefixes, prompt_end(shape, fields, body, start)
            info.prefix = prefixes.hashes(scope, body, start, end)
            info.prefix_bytes = end - start
            blocks, tokens = prefixes.reported_prefix(info.prefix)
            if blocks and info.text_bytes and not info.counted and info.prompts == 1:
                use_known_prefix(info, tokens, info.bytes_before + COVERED[blocks])

    def counter_for(self, info: RequestInfo, *, by_size: bool) -> Worker | None:
        """Return the worker to count a request's tokens; None if the estimate suffices."""
        if not info.countable or info.counted:
            return None
        pool, tenant = self._roster.pool(info.model), info.tenant
        near = info.body_bytes <= MAX_COUNTED_BYTES and self._is_near(info, pool, by_size=by_size)
        if not near and (tenant is None or not _would_be_refused(info, tenant)):
            return None
        healthy = (worker for worker in pool.members if not worker.is_barred)
        return min(healthy, key=lambda worker: (worker.requests, worker.index), default=None)

    def _is_near(self, info: RequestInfo, pool: Pool, *, by_size: bool) -> bool:
        """Return whether the exact count may change the routing."""
        error, needs = info.prompt_error, info.needed_context
        if by_size and pool.mixed and abs(info.expected_tokens - self._short_limit) <= error:
            return True
        for limit in pool.boundaries:  # noqa: SIM110 - usually empty
            if abs(needs - limit) <= error:
                return True
        return False

    def apply_count(self, info: RequestInfo, prompt_tokens: int) -> None:
        self._sizer.apply_count(info, prompt_tokens)
        self._shrink_if_too_long(info)
        info.long = info.expected_tokens > self._short_limit

    def _shrink_if_too_long(self, info: RequestInfo) -> None:
        pinned = self._roster.get(info.pinned) if info.pinned else None
        pool = self._roster.pool(info.model)
        context = pool.context_limit if pinned is None else pinned.context_limit
        if info.needed_context > context:
            shrink_to_fit(info, context, cuts_output=self._settings.cut_output)


def _fields_of_json(body: bytes, large: LargeBody | None) -> dict[str, Any]:
    if large is not None:
        while large.advance():
            pass
        if bound := large.exceeded_bound:
            raise RefusedError(refusals.bad_request(f"The body has more than {bound}."))
    try:
        fields = parsed(body) if large is None else large.fields()
    except orjson.JSONDecodeError as error:
        raise RefusedError(refusals.bad_request(f"The body is not JSON: {error}")) from None
    if type(fields) is not dict:
        raise RefusedError(refusals.bad_request("The body must be a JSON object."))
    return fields


def _name_session(
    info: RequestInfo, shape: PromptFields, fields: dict[str, Any], session_id: bytes
) -> None:
    if not session_id:
        session_id = id_in_body(fields)
    if not session_id and shape is RESPONSE:
        info.is_chained = True
        session_id = previous_response(fields)
    if session_id:
        owner = "" if info.tenant is None else info.tenant.name
        info.session = session_key(owner, info.model, session_id)


def _allow_split(info: RequestInfo, fields: dict[str, Any]) -> None:
    """Note the names of the fields if a request may be handed over."""
    info.why_whole = info.why_whole or why_not_split(info, fields)
    info.has_min_tokens = "min_tokens" in fields
    if info.why_whole:
        return
    edits = info.edits or {}
    added = {name for name, text in edits.items() if text is not None}
    info.field_names = frozenset((fields.keys() - edits.keys()) | added)


def _prepare_edits(info: RequestInfo, body: bytes, mask: JsonMask | None) -> None:
    """Check that a body can be edited, and note where the fields to edit are."""
    in_body, edits = check_members(body, mask), info.edits
    if in_body is not None and edits is not None:
        names = {name.encode() for name in edits}
        info.found_members = [member for member in in_body if member.name in names]


def _would_be_refused(info: RequestInfo, tenant: Tenant) -> bool:
    """Return whether an estimate alone would refuse a prompt by its tenant's limit.

    No worker checks that limit.
    """
    limit = tenant.spec.limits.max_prompt_tokens
    if limit is None or info.body_bytes > MAX_JUDGED_BYTES:
        return False
    return info.least_prompt <= limit < info.min_prompt_size


def prompt_start(shape: PromptFields, body: bytes) -> int:
    """Return the prompt's start; -1 if prefixes do not apply."""
    key = PROMPT_KEYS.get(shape)
    if key is None:
        return -1
    start = body.find(key)
    if start > MIN_BYTES_BEFORE and shape is not PROMPT:
        for before in KEYS_BEFORE:  # templates put tools and system first
            begin = body.find(before, 0, start)
            if begin >= 0:
                start = begin
    return start


def prompt_end(shape: PromptFields, fields: dict[str, Any], body: bytes, start: int) -> int:
    """Return the prompt's end, before the brackets that a longer prompt has further on."""
    key, names, end = PROMPT_NAMES[shape], [*fields], len(body)
    following = names.index(key) + 1 if key in fields else len(names)
    if following < len(names) and names[following].isascii():
        last = max(start, end - MAX_BYTES_AFTER)
        next_key = body.rfind(b'"' + names[following].encode() + b'"', last)
        end = next_key if next_key >= 0 else end
    closing = body[max(start, end - MAX_CLOSING_BYTES) : end]
    return end - len(closing) + len(closing.rstrip(CLOSING))
