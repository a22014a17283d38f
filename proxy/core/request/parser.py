"""From the bytes of a request to what the router must know of it."""

from __future__ import annotations

import gc
import json
from typing import Any

import orjson

from proxy.core.fleet.charges import Fleet
from proxy.core.fleet.pool import Pool
from proxy.core.fleet.worker import Worker
from proxy.core.model import refusals
from proxy.core.model.route_table import PromptFields, Route
from proxy.core.model.types import Refusal, RequestInfo
from proxy.core.request.client_fields import (
    ID,
    INTERVAL,
    OPTIONS,
    PREVIOUS,
    PRIORITY,
    SALT,
    WITH_OPTIONS,
    WITH_PRIORITY,
    WITH_SALT,
    WITH_USAGE,
    ClientFields,
    forbidden,
    forbidden_form,
    is_true,
    repeated,
    salt_in,
    tells_usage,
)
from proxy.core.request.json_edit import check
from proxy.core.request.json_limits import LARGE, JsonMask, too_many
from proxy.core.request.multipart import form_fields, plain_model
from proxy.core.request.response_owners import ResponseOwners
from proxy.core.request.sizing import Sizer, fit
from proxy.core.request.split_check import whole_because
from proxy.core.tenants.tenants import Rank, Tenant

# The key where each kind of body begins its prompt. A quote inside a JSON string is escaped, so
# that these bytes are found nowhere but at a key (or a string of that very text, which is as good).
PROMPT_KEYS = {
    PromptFields.CHAT: b'"messages"',
    PromptFields.PROMPT: b'"prompt"',
    PromptFields.RESPONSE: b'"input"',
    PromptFields.TOKENS: b'"token_ids"',
}
# By these names they cost a tenth: Python 3.11 looks a member of an enum up in Python.
EMPTY, FORM, RESPONSE, PROMPT = (
    PromptFields.EMPTY,
    PromptFields.FORM,
    PromptFields.RESPONSE,
    PromptFields.PROMPT,
)
OPAQUE = PromptFields.OPAQUE
KEYS_BEFORE = (b'"tools"', b'"system"', b'"instructions"')
SHORTEST_BEFORE = 40  # in front of a prompt so near the start there is no other of them
COUNTED_BYTES = 65_536  # a longer body is not worth sending twice
JUDGED_BYTES = 4 * COUNTED_BYTES  # unless it would be refused by an estimate
UNCLEAR = "The form must name one `model`, and each of its parts plainly, once, in quotes."
BATCH = Rank.BATCH
# What a class is to workers that heed `priority`: less is more urgent. A body that says none is 0.
PRIORITIES = {Rank.INTERACTIVE: b"-1", BATCH: b"1"}


def parsed(body: bytes) -> Any:
    """Parse JSON; the collector would walk all that is made of a large text again and again."""
    if len(body) <= LARGE or not gc.isenabled():
        return _parsed(body)
    gc.disable()
    try:
        return _parsed(body)
    finally:
        gc.enable()


def _parsed(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        if (found := _lenient(body)) is None:
            raise
        return found


def _lenient(body: bytes) -> Any:
    """Parse what vLLM takes though it is not quite JSON: a byte order mark, NaN, Infinity.

    None if it is not UTF-8, or a worker would not take it either, as text that ends in half a
    character. That takes two to four times as long as JSON that is whole.
    """
    try:
        found = json.loads(body.decode("utf-8-sig"))
        orjson.dumps(found)
    except (ValueError, TypeError, RecursionError):
        return None
    return found


class RequestParser:
    """Reads requests for one fleet."""

    def __init__(self, fleet: Fleet, sizer: Sizer, short_limit: int) -> None:
        self.short_limit = short_limit
        self.splits = False  # whether requests may be handed over
        self.may = ClientFields()
        self.passes_priority = False  # whether workers are told the class
        self.cuts_output = False  # whether the largest worker may cut what nobody has room for
        self._fleet = fleet
        self._sizer = sizer
        self.stored = ResponseOwners()

    def read(
        self,
        route: Route,
        body: bytes,
        content_type: bytes,
        request_id: str,
        *,
        hashed: bool,
        tenant: Tenant | None = None,
        batch: bool = False,
    ) -> RequestInfo | Refusal:
        """Read a body: which model, and how large; or say what is wrong with it.

        `batch`: it is served in the gaps, whatever the tenant's class.
        """
        shape = route.shape
        tenants = tenant is not None
        mask: JsonMask | None = None
        if shape is EMPTY:
            return self._by_id(route, request_id, tenant)
        if shape is FORM:
            if named := forbidden_form(body, content_type, tenants=tenants, may=self.may):
                return refusals.forbidden_field(named)
            fields: Any = form_fields(body, content_type)
            if tenant is not None and tenant.spec.models is not None:
                fields["model"] = plain_model(body, content_type)
                if not fields["model"]:
                    return refusals.bad_request(UNCLEAR, "model")
        else:
            if len(body) > LARGE:
                mask = JsonMask(body)
            if what := too_many(body, mask):
                return refusals.bad_request(f"The body has more than {what}.")
            try:
                fields = parsed(body)
            except orjson.JSONDecodeError as error:
                return refusals.bad_request(f"The body is not JSON: {error}")
            if type(fields) is not dict:
                return refusals.bad_request("The body must be a JSON object.")
            if named := forbidden(fields, body, tenants=tenants, may=self.may):
                return refusals.forbidden_field(named)
            if named := repeated(fields, body):
                return refusals.duplicate_field(named)
        model = fields.get("model")
        if type(model) is not str or not self._fleet.serves(model):
            model = self._only_model(model, tenant)
            if isinstance(model, Refusal):
                return model
        if tenant is not None and not tenant.may_use(model):
            return refusals.not_allowed(model, self._known(tenant))
        ask = self._sizer.ask(route, model, fields, len(body), request_id, tenant)
        ask.long = ask.budget > self.short_limit
        if batch:
            ask.rank = BATCH
        elif tenant is not None:
            ask.rank = tenant.spec.rank
        if tenant is not None:
            if (refusal := self._own(ask, tenant, fields, shape)) is not None:
                return refusal
        elif SALT in fields:
            ask.salt = salt_in(fields)
        if hashed:
            self._hash(ask, shape, body)
        if shape is RESPONSE and (previous := fields.get(PREVIOUS)) is not None:
            ask.pinned = self._holder(previous, tenant)
            if tenant is not None and not ask.pinned:
                return refusals.no_response(str(previous))
        self._fit(ask)
        if self.splits:
            ask.whole = ask.whole or whole_because(ask, fields)
            ask.least_output = "min_tokens" in fields
            if not ask.whole:
                ask.said = _said(fields, ask.fields)
        if ask.fields is not None or (self.splits and not ask.whole):
            found = check(body, mask)  # which is changed on its way
            if found is not None and (changed := ask.fields) is not None:
                names = {name.encode() for name in changed}
                ask.found = [each for each in found if each.name in names]
        return ask

    def _own(
        self, ask: RequestInfo, tenant: Tenant, fields: dict[str, Any], shape: PromptFields
    ) -> Refusal | None:
        """Note whose it is, and what of its body is for the router to say."""
        ask.tenant = tenant
        changed: dict[str, bytes | None] = {ID: None} if ID in fields else {}
        if tenant.spec.models is not None:  # a worker takes its own where none is named
            changed["model"] = orjson.dumps(ask.model)
        if not self.may.priority:
            if PRIORITY in fields:
                changed[PRIORITY] = None
            if self.passes_priority and ask.route in WITH_PRIORITY and ask.rank in PRIORITIES:
                changed[PRIORITY] = PRIORITIES[ask.rank]
        if INTERVAL in fields:
            changed[INTERVAL] = None
        if ask.stream:
            # Whoever searches writes nothing before the end.
            ask.stream = not is_true(fields.get("use_beam_search"))
            if ask.route in WITH_OPTIONS and not tells_usage(fields):
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
        known = self._fleet.models()
        return [name for name in known if tenant is None or tenant.may_use(name)]

    def _only_model(self, named: object, tenant: Tenant | None) -> str | Refusal:
        """Take the fleet's model where none is named; vLLM needs no name either."""
        known = self._known(tenant)
        if named is None or named == "":
            if len(known) == 1:
                return known[0]
            return refusals.bad_request("The body must name a `model`.", "model")
        if type(named) is str:
            return refusals.model_not_served(named, known, all_told=self._fleet.all_told(named))
        return refusals.bad_request("`model` must be a string.", "model")

    def _by_id(self, route: Route, request_id: str, tenant: Tenant | None) -> RequestInfo | Refusal:
        """Ask the worker that stores a response; any other says in its own words that none is.

        What is not known to be a tenant's may be another's: nobody is asked then.
        """
        holder = self._holder(route.response_id, tenant)
        if tenant is not None and not holder:
            return refusals.no_response(route.response_id)
        fleet = self._fleet
        worker, models = fleet.get(holder), fleet.models()
        live = (each for each in models if fleet.pool(each).all)
        model = worker.model if worker else next(live, next(iter(models), ""))
        ask = self._sizer.ask(route, model, {}, 0, request_id, tenant)
        ask.pinned = holder
        if tenant is not None:
            ask.tenant, ask.rank = tenant, tenant.spec.rank
        return ask

    def _holder(self, response_id: object, tenant: Tenant | None) -> str:
        if type(response_id) is not str:
            return ""
        holder = self.stored.holder(response_id, tenant)
        return holder if holder in self._fleet else ""

    def remember(self, response_id: str, worker: str, tenant: Tenant | None = None) -> None:
        """Note which worker stores a response, and whose."""
        self.stored.remember(response_id, worker, tenant)

    def _hash(self, ask: RequestInfo, shape: PromptFields, body: bytes) -> None:
        start = prompt_start(shape, body)
        if start >= 0:
            whose = f"{ask.model}\n{ask.salt}" if ask.salt else ask.model
            ask.prefix = self._fleet.prefixes.hashes(whose, body, start)
            ask.prefix_bytes = len(body) - start

    # Counting

    def counter_for(self, ask: RequestInfo, *, by_size: bool) -> Worker | None:
        """Name the worker whose /tokenize should count an ask; None if the estimate will do."""
        if not ask.countable or ask.counted:
            return None
        pool, tenant = self._fleet.pool(ask.model), ask.tenant
        near = ask.body_bytes <= COUNTED_BYTES and self._is_near(ask, pool, by_size=by_size)
        if not near and (tenant is None or not _would_be_refused(ask, tenant)):
            return None
        well = (worker for worker in pool.members if not worker.barred)
        return min(well, key=lambda worker: (worker.requests, worker.index), default=None)

    def _is_near(self, ask: RequestInfo, pool: Pool, *, by_size: bool) -> bool:
        """Whether the count may decide who serves it."""
        error = ask.prompt_error
        if by_size and pool.mixed and abs(ask.budget - self.short_limit) <= error:
            return True
        needs = ask.needs
        for limit in pool.boundaries:  # noqa: SIM110 - most often there is none
            if abs(needs - limit) <= error:
                return True
        return False

    def counted(self, ask: RequestInfo, prompt_tokens: int) -> None:
        """Take a worker's count."""
        self._sizer.counted(ask, prompt_tokens)
        self._fit(ask)
        ask.long = ask.budget > self.short_limit

    def _fit(self, ask: RequestInfo) -> None:
        pinned = self._fleet.get(ask.pinned) if ask.pinned else None
        most = self._fleet.pool(ask.model).limit if pinned is None else pinned.limit
        if ask.needs > most:
            fit(ask, most, cuts_output=self.cuts_output)


def _said(fields: dict[str, Any], changed: dict[str, bytes | None] | None) -> frozenset[str]:
    """Name the members of a body as it will be, once some are set or taken out."""
    if changed is None:
        return frozenset(fields)
    added = {name for name, text in changed.items() if text is not None}
    return frozenset((fields.keys() - changed.keys()) | added)


def _would_be_refused(ask: RequestInfo, tenant: Tenant) -> bool:
    """Whether a mere estimate says that a prompt is longer than its tenant may have.

    No worker has the last word on that, as it has on its context.
    """
    most = tenant.spec.limits.max_prompt_tokens
    if most is None or ask.body_bytes > JUDGED_BYTES:
        return False
    return ask.least_prompt <= most < ask.largest_prompt - ask.prompt_error


def prompt_start(shape: PromptFields, body: bytes) -> int:
    """Find where a body's prompt begins; -1 where prefixes are of no use."""
    key = PROMPT_KEYS.get(shape)
    if key is None:
        return -1
    start = body.find(key)
    if start > SHORTEST_BEFORE and shape is not PROMPT:
        for before in KEYS_BEFORE:  # a template prints tools and system first
            found = body.find(before, 0, start)
            if found >= 0:
                start = found
    return start
