"""The router's results for many inputs, one line each, to compare plain and compiled modules.

    python -m tests.fuzz.transcript PART COUNT [PART COUNT ...]

Both processes get the same inputs: every random choice has a fixed seed. Hypothesis is not used, as
its choices depend on the sources that it finds. Set `PYTHONHASHSEED`: some lines show sets.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Iterator
from itertools import pairwise

import uvloop

from proxy.core.model.route_table import ROUTES
from proxy.core.request import token_estimate
from proxy.core.request.client_fields import ClientFields, find_forbidden_in_form
from proxy.core.request.multipart import form_fields, plain_model
from proxy.http.response_parser import ResponseParser
from proxy.http.sse import EventStream, remove_usage, replace_cached_tokens, usage_in
from tests.fuzz import judge
from tests.fuzz.mutate import Mutator
from tests.fuzz.test_bodies import FORM_TYPE, JSON_TYPE, play_request
from tests.fuzz.test_sockets import SEED as SOCKET_SEED
from tests.fuzz.test_sockets import play
from tests.fuzz.texts import INVALID_NUMBERS, INVALID_STRINGS, KEYS, ODD_NUMBERS, ODD_STRINGS
from tests.proxy.wire import scripts
from tests.proxy.wire.site import Fake, Site

SEED = 21
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"  # sent only if a body is late
FORMS = tuple(
    b"".join(b"--b\r\n%b\r\n\r\n%b\r\n" % part for part in parts) + b"--b--\r\n"
    for parts in (
        ((b'Content-Disposition: form-data; name="model"', b"tiny"),),
        (
            (b'Content-Disposition: form-data; name="file"; filename="a.wav"', b"\x00\xff" * 20),
            (b'Content-Disposition: form-data; name="vllm_xargs"', b'{"kv_transfer_params": 1}'),
        ),
        (
            (b"content-disposition:form-data;name=vllm_xargs", b'{"x": 1}'),
            (b"Content-Disposition: form-data; name*0=vllm_; name*1=xargs", b"[]"),
            (b'Content-Disposition: form-data; name="stream"', b"true"),
        ),
    )
)
PROMPT_MEMBERS = '"model":"tiny","prompt":"x","messages":[],"input":"x"'
SPELT_KEYS = (*(f'"{key}"' for key in KEYS), '"\\u006dodel"', '"vllm_\\u0078args"')
VALID_VALUES = (*ODD_NUMBERS, *ODD_STRINGS, '"' + "é" * 40_000 + '"', "true", "false", "null")
INVALID_VALUES = (*INVALID_NUMBERS, *INVALID_STRINGS, "tru", "[")
EVENTS = (
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":1,'
    b'"prompt_tokens_details":{"cached_tokens":3}}}\n\ndata: [DONE]\n\n',
    b'event: message_start\ndata: {"type":"message_start","usage":{"input_tokens":5,'
    b'"cache_read_input_tokens":2}}\n\nevent: content_block_delta\ndata: {"delta":{"text":"a"},'
    b'"type":"content_block_delta"}\n\nevent: message_delta\ndata: {"usage":'
    b'{"output_tokens":3}}\n\n',
    b'data: {"type":"message-start"}\r\n\r\ndata: {"type":"content-delta","text":"a"}\r\n\r\n',
)


def requests(count: int) -> Iterator[object]:
    """Parse streams of requests, cut in three ways; yield them and the bytes for a worker."""
    for number in range(count):
        mutator = Mutator(SEED, number)
        messages = mutator.requests()
        data = b"".join(messages)
        for pieces in ([data], mutator.cuts(data), messages):
            try:
                found, state, refusal = judge.read(pieces)
            except Exception as error:
                yield repr(error)
                continue
            sent = [
                judge.worker_bytes(request) for request in found if request.head.route is not None
            ]
            yield judge.fields_of(found), state, refusal, sent


def answers(count: int) -> Iterator[object]:
    """Parse streams of answers, whole and cut."""
    for number in range(count):
        mutator = Mutator(SEED, number)
        messages = mutator.answers()
        data = b"".join(messages)
        for pieces in (messages, mutator.cuts(data)):
            reader, shown = ResponseParser(), []
            for piece in pieces:
                if reader.ended:
                    reader.expect()
                try:
                    shown.append(judge.parse_answer(reader, [piece])[::2])
                except Exception as error:
                    shown.append(repr(error))
                    break
            yield shown


def bodies(count: int) -> Iterator[object]:
    """Play requests with random bodies."""
    token_estimate.SAMPLE_STEP_FACTOR, token_estimate.SAMPLE_PHASE = 0.75, 0.5  # random by default
    paths, kinds = sorted(ROUTES), (JSON_TYPE, JSON_TYPE, JSON_TYPE, FORM_TYPE, b"\xff")
    for number in range(count):
        mutator = Mutator(SEED, number)
        dice = mutator.random
        members = [f"{dice.choice(SPELT_KEYS)}:{_value(dice, 0)}" for _ in range(dice.randrange(8))]
        text = ",".join(
            [dice.choice(("", PROMPT_MEMBERS, PROMPT_MEMBERS, PROMPT_MEMBERS)), *members]
        ).strip(",")
        data = f"{{{text}}}".encode("utf-8", "surrogatepass")
        if dice.random() < 0.2:
            data = mutator.bytes_changed(data)
        try:
            yield play_request(ROUTES[dice.choice(paths)], data, dice.choice(kinds))
        except Exception as error:
            yield repr(error)


def _value(dice: random.Random, depth: int) -> str:
    """Return a JSON value; one in thirty is invalid."""
    chance = dice.random()
    if depth < 4 and chance < 0.2:
        return "[" + ",".join(_value(dice, depth + 1) for _ in range(dice.randrange(4))) + "]"
    if depth < 4 and chance < 0.4:
        members = [f"{dice.choice(SPELT_KEYS)}:{_value(dice, depth + 1)}" for _ in range(2)]
        return "{" + ",".join(members) + "}"
    return dice.choice(INVALID_VALUES if chance > 0.97 else VALID_VALUES)


def forms(count: int) -> Iterator[object]:
    """Parse truncated forms and forms with changed bytes."""
    cut = [form[:end] for form in FORMS for end in range(len(form) + 1)]
    changed = [
        Mutator.bytes_changed(Mutator(SEED, number), FORMS[number % len(FORMS)])
        for number in range(count)
    ]
    for form in cut + changed:
        try:
            named = [
                find_forbidden_in_form(form, FORM_TYPE, tenants=tenants, allowed=ClientFields())
                for tenants in (False, True)
            ]
            yield named, form_fields(form, FORM_TYPE), plain_model(form, FORM_TYPE)
        except Exception as error:
            yield repr(error)


def events(count: int) -> Iterator[object]:
    """Pass cut and changed event streams."""
    for number in range(count):
        mutator = Mutator(SEED, number)
        data = EVENTS[number % len(EVENTS)]
        if number > len(EVENTS):
            data = mutator.bytes_changed(data)
        ends = sorted({0, len(data), *(mutator.random.randrange(len(data)) for _ in range(3))})
        stream = EventStream()
        try:
            passed = [(stream.feed(data[a:b]), stream.tokens) for a, b in pairwise(ends)]
            rewritten = [replace_cached_tokens(data, 1), remove_usage(data), usage_in(data)]
            yield passed, stream.rest(), stream.usage(), stream.error_event("no", "no"), rewritten
        except Exception as error:
            yield repr(error)


def sockets(count: int) -> Iterator[object]:
    """Send streams of requests to a router; yield what the client and the worker receive."""
    yield from uvloop.run(_sockets(count))  # not asyncio's loop: the router runs on this one


async def _sockets(count: int) -> list[object]:
    site = Site({}, {"linger_s": 10.0})
    await site.start((Fake(),))
    site.wire._id_prefix = b"id"
    site.fake.always(scripts.answer())
    host = b"127.0.0.1:%d" % site.fake.port
    shown: list[object] = []
    for number in range(count):
        read, _, _ = judge.read([b"".join(Mutator(SOCKET_SEED, number).requests())])
        if not all(request.head.keep_alive for request in read):
            continue  # the bytes after such a request may have the connection reset
        received, before = bytearray(), len(site.fake.served)
        taken = await play(site, number, received)
        calls = [(call.head.replace(host, b"w"), call.body) for call in site.fake.served[before:]]
        shown.append((taken, bytes(received).replace(CONTINUE, b""), calls))
    await asyncio.wait_for(site.stop(), 60.0)
    return shown


PARTS = {each.__name__: each for each in (requests, answers, bodies, forms, events, sockets)}


if __name__ == "__main__":
    for name, number in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        for line in PARTS[name](int(number)):
            print(name, repr(line))  # noqa: T201
