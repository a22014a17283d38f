"""Fake prefill and decode workers that keep account of KV blocks, with the API of vLLM over NIXL.

A prefill pins blocks and returns parameters, which are valid for one decode of the same prompt.
`Kv.faults` lists violations: parameters used twice, for another prompt, or invented; a prefill that
decodes; a whole request on a prefill worker; a leg of a request that cannot be split. A real worker
would return garbage with status 200.

Every worker gives the same response to a prompt: `answer_to`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import Call, FakeWorker, Script
from tests.proxy.wire.scripts import LAST_CHUNK, SSE, chunk, event, head

CACHED = 11  # tokens of each prompt that are cached on a prefill worker
USUAL_TOKENS = 4  # of a response without a limit
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES, COHERE = "/v1/responses", "/v1/messages", "/cohere/v2/chat"
# The events of a stream before its first token, and the names of the events with tokens.
OPENINGS = {
    CHAT: b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n',
    RESPONSES: b'event: response.created\ndata: {"type":"response.created","response":{}}\n\n'
    b'event: response.in_progress\ndata: {"type":"response.in_progress","response":{}}\n\n',
    MESSAGES: b'event: message_start\ndata: {"type":"message_start","message":{}}\n\n',
    COHERE: b'data: {"id":"c","delta":{"message":{"role":"assistant"}},"type":"message-start"}\n\n',
}
DELTAS = {
    RESPONSES: (b"event: response.output_text.delta\n", "response.output_text.delta"),
    MESSAGES: (b"event: content_block_delta\n", "content_block_delta"),
    COHERE: (b"", "content-delta"),
}
REMOTE = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


@dataclass
class Pinned:
    """Blocks of a prefill."""

    worker: str
    prompt: str
    params: dict[str, Any]
    request_id: bytes
    call: Call
    end: str = ""  # how they were freed: `read`, `released`, or empty while they are held


@dataclass
class Faults:
    """What a worker does wrong in one leg, and when."""

    before: Script | None = None  # instead of the work
    during: Script | None = None  # after the work, instead of the response
    cut: tuple[int, str] | None = None  # tokens of the response, and how it ends then


@dataclass
class Kv:
    """The blocks of all prefill workers of a test."""

    pinned: list[Pinned] = field(default_factory=list)
    made: int = 0  # the number of all prefills
    faults: list[str] = field(default_factory=list)
    injected: dict[str, list[Faults]] = field(default_factory=dict)  # by role or worker

    @property
    def held(self) -> list[Pinned]:
        """Blocks that are not freed."""
        return [blocks for blocks in self.pinned if not blocks.end]

    def ends(self) -> list[str]:
        """Return how each prefill's blocks ended, in order."""
        return [blocks.end for blocks in self.pinned]

    def inject(self, target: str, *faults: Faults) -> None:
        """Inject faults into the next legs on a worker, or on any worker of a role."""
        self.injected.setdefault(target, []).extend(faults)

    def worker(self, fake: FakeWorker, role: str) -> Script:
        """Return the script of a worker of this role."""

        async def run(call: Call) -> None:
            await _Leg(self, fake, role, call).answer()

        return run

    def next_faults(self, fake: FakeWorker, role: str) -> Faults:
        """Take the faults of the next leg."""
        for target in (fake.name, role):
            if waiting := self.injected.get(target):
                return waiting.pop(0)
        return Faults()


class _Leg:
    """A request to a worker."""

    def __init__(self, kv: Kv, fake: FakeWorker, role: str, call: Call) -> None:
        self.kv, self.fake, self.role, self.call = kv, fake, role, call
        self.body: dict[str, Any] = json.loads(call.body)
        self.params: dict[str, Any] = self.body.get("kv_transfer_params") or {}
        self.prompts = prompts_of(self.body)

    def fault(self, what: str) -> None:
        self.kv.faults.append(f"{self.fake.name}: {what}")

    async def answer(self) -> None:
        faults = self.kv.next_faults(self.fake, self.role)
        if faults.before is not None:
            await faults.before(self.call)
            return
        if self.body.get("model", self.fake.model) != self.fake.model:
            self._free("released")  # vLLM frees the blocks of requests that its frontend refuses
            await scripts.error(404, "no such model")(self.call)
        elif (why := refused(self.body)) is not None:
            self._free("released")
            await scripts.error(400, why)(self.call)
        elif self.params.get("do_remote_decode"):
            await self._prefill(faults)
        else:
            await self._decode(faults)

    # The two legs

    async def _prefill(self, faults: Faults) -> None:
        if self.role != "prefill":
            self.fault("got a prefill leg")
        if self.params.get("do_remote_prefill") or any(self.params.get(k) for k in REMOTE):
            self.fault(f"a prefill leg that reads blocks: {self.params}")
        if limit_of(self.body) != 1:
            self.fault(f"a prefill leg that writes {limit_of(self.body)} tokens")
        if self.body.get("stream"):
            self.fault("a prefill leg that streams")
        if (codings := self.call.all(b"accept-encoding")) != [b"identity"]:
            self.fault(f"a prefill leg that may be compressed: {codings}")
        if len(self.prompts) != 1 or self.body.get("n", 1) not in (1, None):
            self.fault("a prefill leg of several sequences")
        if faults.during is not None:
            await faults.during(self.call)
            return
        if self.call.lost.is_set():
            return  # dropped, as an engine drops an aborted request
        params = self._pin() if faults.cut is None else {"do_remote_prefill": True}
        await self._whole(1, faults.cut, CACHED, {"kv_transfer_params": params})

    def _pin(self) -> dict[str, Any]:
        number = self.kv.made
        self.kv.made += 1
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[number * 4 + block for block in range(1, 4)]],
            "remote_engine_id": f"engine-{self.fake.name}",
            "remote_request_id": f"cmpl-{number}-8f3aa91a",
            "remote_host": "localhost",
            "remote_port": 5600,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": self.prompt_tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": CACHED,
        }
        ids = self.call.all(b"x-request-id")
        self.kv.pinned.append(
            Pinned(self.fake.name, self.prompts[0], params, ids[0] if ids else b"", self.call)
        )
        return params

    def _free(self, how: str) -> None:
        """Use up parameters, if there are any."""
        if not self.params.get("do_remote_prefill"):
            return
        if self.role != "decode":
            self.fault("got a decode leg")
        request_id = self.params.get("remote_request_id")
        for blocks in self.kv.pinned:
            if blocks.params["remote_request_id"] == request_id:
                break
        else:
            self.fault(f"unknown parameters: {self.params}")
            return
        # To release freed blocks is harmless; to read them is a fault.
        if blocks.end and how == "read":
            self.fault(f"{request_id} was {blocks.end} before, and is {how} now")
        elif blocks.params != self.params:
            self.fault(f"{self.params} were given as {blocks.params}")
        elif how == "read" and (
            self.prompts != [blocks.prompt] or self.call.all(b"x-request-id") != [blocks.request_id]
        ):
            self.fault(f"{request_id} is of another request")
        blocks.end = blocks.end or how

    async def _decode(self, faults: Faults) -> None:
        remote = bool(self.params.get("do_remote_prefill"))
        if not remote and self.role == "prefill":
            self.fault("got a whole request")
        if remote and (len(self.prompts) != 1 or self.body.get("n", 1) not in (1, None)):
            self.fault("a decode leg of several sequences")
        echoed = self.body.get("echo") and self.body.get("logprobs") is not None
        if remote and (self.body.get("prompt_logprobs") or echoed):
            self.fault("a decode leg that has to look at the prompt")
        self._free("read")
        if faults.during is not None:
            await faults.during(self.call)
            return
        cached = self.params.get("remote_prefill_cached_tokens", 0)
        tokens = limit_of(self.body) or USUAL_TOKENS
        if self.body.get("stream"):
            await self._stream(tokens, faults.cut, cached)
        else:
            await self._whole(tokens, faults.cut, cached, {})

    # Answers

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts)) // 4 + 1

    def _usage(self, tokens: int, cached: int) -> dict[str, Any]:
        sequences = len(self.prompts) * (self.body.get("n") or 1)
        return scripts.usage(self.prompt_tokens, tokens * sequences) | {
            "prompt_tokens_details": {"cached_tokens": cached}
        }

    def _texts(self, tokens: int) -> Iterator[list[str]]:
        for prompt in self.prompts:
            for sample in range(self.body.get("n") or 1):
                yield [
                    *([prompt] if self.body.get("echo") else []),
                    *answer_to(prompt, tokens, sample),
                ]

    async def _whole(
        self, tokens: int, cut: tuple[int, str] | None, cached: int, extra: dict[str, Any]
    ) -> None:
        choices = [
            {"index": index, "finish_reason": "length", **self._piece("message", "".join(text))}
            for index, text in enumerate(self._texts(tokens))
        ]
        answer = {"id": "c", "object": "x", "created": 1, "model": self.fake.model,
                  "choices": choices, "usage": self._usage(tokens, cached)} | extra  # fmt: skip
        data = json.dumps(answer).encode()
        if cut is None:
            await scripts.answer(200, data, (b"x-worker", self.fake.name.encode()))(self.call)
            return
        lead = (b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))
        await self.call.send(head(200, *lead) + data[: len(data) // 2 if cut[0] else 0])
        await scripts.finish(self.call, cut[1])

    async def _stream(self, tokens: int, cut: tuple[int, str] | None, cached: int) -> None:
        await self.call.send(head(200, (b"content-type", SSE), (b"transfer-encoding", b"chunked")))
        if self.call.path in DELTAS:
            await self.call.send(chunk(OPENINGS[self.call.path]))
        lists = list(self._texts(tokens))
        sent = 0
        for number in range(max(map(len, lists))):
            for index, text in enumerate(lists):
                if cut is not None and sent == cut[0]:
                    await scripts.finish(self.call, cut[1])
                    return
                if number < len(text):
                    await self._event(index, text[number], last=number + 1 == len(text))
                    sent += 1
        if (self.body.get("stream_options") or {}).get("include_usage"):
            await self.call.send(
                chunk(event({"id": "c", "choices": [], "usage": self._usage(tokens, cached)}))
            )
        await self.call.send(chunk(scripts.DONE) + LAST_CHUNK)

    async def _event(self, index: int, text: str, *, last: bool) -> None:
        if (named := DELTAS.get(self.call.path)) is not None:
            start, kind = named
            await self.call.send(chunk(start + event({"type": kind, "delta": text})))
            return
        reason = "length" if last else None
        choice = {"index": index, "finish_reason": reason, **self._piece("delta", text)}
        await self.call.send(chunk(event({"id": "c", "created": 1, "choices": [choice]})))

    def _piece(self, where: str, text: str) -> dict[str, Any]:
        if self.call.path == CHAT:
            return {where: {"role": "assistant", "content": text}}
        return {"text": text}


def answer_to(prompt: str, tokens: int, sample: int = 0) -> list[str]:
    """Return what every worker answers to a prompt, token by token."""
    mark = f"{len(prompt)}.{sample}"
    return [f"{mark}:{number} " for number in range(tokens)]


def prompts_of(body: dict[str, Any]) -> list[str]:
    """Return a body's prompts as distinct texts."""
    if "messages" in body:
        return [json.dumps(body["messages"])]
    prompt = body.get("prompt", body.get("input", body.get("token_ids")))
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return [item if isinstance(item, str) else json.dumps(item) for item in prompt]
    return [prompt if isinstance(prompt, str) else json.dumps(prompt)]


def limit_of(body: dict[str, Any]) -> int | None:
    """Return the token limit of a body; vLLM prefers the newer name."""
    return next((body[name] for name in LIMITS if body.get(name) is not None), None)


def refused(body: dict[str, Any]) -> str | None:
    """Return why vLLM would answer 400, or None."""
    limit = limit_of(body)
    if body.get("stream_options") and not body.get("stream"):
        return "Stream options can only be defined when `stream=True`."
    if limit is not None and (body.get("min_tokens") or 0) > limit:
        return "min_tokens must be less than or equal to max_tokens"
    if limit is not None and limit < 1:
        return "max_tokens must be at least 1"
    return None
