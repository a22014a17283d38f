"""Compare predictions of cached tokens with what an engine finds, for prompts of mixed texts.

    python -m benchmarks.cached_predictions [--blocks 16,32,128] [--seed 0]

The router and its prefix index are the real ones. A set of token blocks with an endless memory, and
a byte-pair tokenizer that is trained on the texts, stand for the engine. It reports as a journal.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from proxy.core.fleet.charges import idle_fleet
from proxy.core.fleet.leases import Lease
from proxy.core.learned.resident_prefixes import ResidentPrefixes, name_of
from proxy.core.model.role import Role
from proxy.core.model.route_table import Route
from proxy.core.model.specs import WorkerSpec
from proxy.core.model.types import Outcome, ReceivedRequest, RequestInfo, Usage
from proxy.core.request.route_lookup import find
from proxy.core.router import Router, RouterSettings

ROOT: Final = Path(__file__).parents[1]
MODEL: Final = "tiny"
VOCABULARY: Final = 16_384
CONTEXT: Final = 1_000_000
ROLES: Final = "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"
CHINESE_CHARS: Final = 1500
TAIL: Final = {"model": MODEL, "max_tokens": 400, "temperature": 0}


class Engine:
    """Blocks of tokens, and reports about them."""

    def __init__(self, prefixes: ResidentPrefixes, block_tokens: int) -> None:
        self._prefixes, self._block = prefixes, block_tokens
        self._blocks: set[int] = set()
        self._number = 0
        prefixes.restart(block_tokens)

    def serve(self, prompt: list[int], output: list[int], name: bytes) -> int:
        """Serve a request; return its cached tokens."""
        self._number += 1
        number, size = self._number, self._block
        self._prefixes.add_name(number, name, len(prompt))
        cached, names = 0, self._names(prompt + output[:-1])
        while cached < (len(prompt) - 1) // size and names[cached] in self._blocks:
            cached += 1
        self._prefixes.record_found(number, cached * size)
        self._prefixes.record_resident(number, len(prompt) // size * size)
        self._prefixes.record_resident(number, len(names) * size)
        self._blocks.update(names)
        return cached * size

    def _names(self, tokens: list[int]) -> list[int]:
        names, name = [], 0
        for start in range(0, len(tokens) // self._block * self._block, self._block):
            name = hash((name, *tokens[start : start + self._block]))
            names.append(name)
        return names


@cache
def texts() -> dict[str, str]:
    """Return long texts of each kind."""
    rng = random.Random(0)
    code = "".join(path.read_text() for path in sorted(ROOT.glob("proxy/**/*.py")))
    prose = "".join(path.read_text() for path in sorted(ROOT.glob("docs/*.md")))
    names, words = code.split(), prose.split()
    records = [
        {"id": rng.randrange(10**6), "path": rng.choice(names), "ok": rng.random() < 0.5,
         "value": round(rng.random(), 6), "tags": rng.choices(words, k=3)}
        for _ in range(4000)
    ]  # fmt: skip
    weights = [1 / (n + 5) for n in range(CHINESE_CHARS)]
    chars = [chr(0x4E00 + 7 * n) for n in range(CHINESE_CHARS)]
    chinese = "".join(rng.choices([*chars, "\uff0c", "\u3002"], [*weights, 0.2, 0.1], k=200_000))
    return {"code": code, "prose": prose, "json": json.dumps(records), "chinese": chinese}


@cache
def tokenizer() -> Tokenizer:
    """Return a tokenizer that is trained on the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(ROLES), show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    tokenizer.train_from_iterator((text[:200_000] for text in texts().values()), trainer)
    return tokenizer


def encode(text: str) -> list[int]:
    ids: list[int] = tokenizer().encode(text).ids
    return ids


def chat_tokens(messages: list[dict[str, Any]], tools: list[Any] | None) -> list[int]:
    """Return the prompt of a chat, as a template prints it."""
    text = ""
    if tools:
        text += f"<|system|>Tools:\n{json.dumps(tools, indent=1)}<|end|>"
    for message in messages:
        text += f"<|{message['role']}|>{message['content']}<|end|>"
    return encode(text + "<|assistant|>")


class Traffic:
    """Requests of several kinds, each with its prompt and output."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def text(self, low: int, high: int, kind: str = "") -> str:
        """Return a piece of text of so many characters."""
        kind = kind or self.rng.choice(list(texts()))
        length = int(low * (high / low) ** self.rng.random()) // (3 if kind == "chinese" else 1)
        at = self.rng.randrange(len(texts()[kind]) - length)
        return texts()[kind][at : at + length]

    def chat(
        self, messages: list[dict[str, Any]], answer: str, tools: list[Any] | None = None
    ) -> tuple[str, dict[str, Any], list[int], list[int]]:
        body = {"messages": messages, **TAIL, **({"tools": tools} if tools else {})}
        return "chat/completions", body, chat_tokens(messages, tools), encode(answer + "<|end|>")

    def systems(self) -> Iterator[Any]:
        """Yield a system prompt with questions."""
        system = {"role": "system", "content": self.text(400, 40_000)}
        for _ in range(12):
            user = {"role": "user", "content": self.text(20, 2000)}
            yield self.chat([system, user], self.text(20, 1500))

    def turns(self) -> Iterator[Any]:
        """Yield a conversation."""
        messages: list[dict[str, Any]] = []
        for _ in range(8):
            messages.append({"role": "user", "content": self.text(30, 8000)})
            answer = self.text(30, 2000)
            yield self.chat([*messages], answer)
            messages.append({"role": "assistant", "content": answer})

    def agents(self) -> Iterator[Any]:
        """Yield sessions of an agent, which share its tools."""
        tools = [
            {"type": "function", "function": {"name": f"f{n}", "description": self.text(100, 900)}}
            for n in range(8)
        ]
        system = {"role": "system", "content": self.text(2000, 12_000, "prose")}
        for _ in range(3):
            messages = [system, {"role": "user", "content": self.text(50, 1000)}]
            for _ in range(6):
                answer = self.text(50, 500)
                yield self.chat([*messages], answer, tools)
                messages.append({"role": "assistant", "content": answer})
                messages.append({"role": "tool", "content": self.text(100, 6000)})

    def documents(self) -> Iterator[Any]:
        """Yield parts of a document, each with a question."""
        document = "".join(self.text(300, 3000) for _ in range(10))
        for _ in range(10):
            cut = self.rng.randrange(len(document))
            prompt = document[:cut] + "\n\nQuestion: " + self.text(20, 200)
            body = {"prompt": prompt, **TAIL}
            yield "completions", body, encode(prompt), encode(self.text(20, 800))

    def repeats(self) -> Iterator[Any]:
        """Yield the same prompt again and again."""
        user = {"role": "user", "content": self.text(300, 8000)}
        for _ in range(5):
            yield self.chat([user], self.text(30, 800))

    def mixed(self, rounds: int) -> list[tuple[str, Any]]:
        """Return requests of all kinds; those of one kind keep their order."""
        kinds = [self.systems, self.turns, self.agents, self.documents, self.repeats]
        flows: list[tuple[str, list[Any]]] = [
            (kind.__name__, list(kind())) for _ in range(rounds) for kind in kinds
        ]
        jobs = []
        while flows:
            kind, left = self.rng.choice(flows)
            jobs.append((kind, left.pop(0)))
            flows = [flow for flow in flows if flow[1]]
        return jobs


def play(traffic: Sequence[tuple[str, Any]], block_tokens: int) -> dict[str, list[tuple[int, int]]]:
    """Return predicted and found tokens by kind."""
    fleet = idle_fleet([WorkerSpec("w", "http://w", Role.GENERAL, MODEL, CONTEXT)])
    worker = fleet.roster.get("w")
    assert worker is not None
    router, index = Router(RouterSettings(), fleet), fleet.roster.prefixes
    engine = Engine(ResidentPrefixes(index, worker.index), block_tokens)
    worker.reports_prefixes = True
    tokens: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for now, (kind, (path, fields, prompt, output)) in enumerate(traffic):
        route = find("POST", f"/v1/{path}")
        assert isinstance(route, Route)
        body = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
        info = router.read(ReceivedRequest(route, body, b"application/json", str(now)))
        assert isinstance(info, RequestInfo)
        lease = router.submit(info, now)
        assert isinstance(lease, Lease), lease
        predicted = lease.decision.cached_tokens
        cached = engine.serve(
            prompt, output, name_of(info.prefix, info.prefix_bytes, info.bytes_before)
        )
        tokens[kind].append((predicted, cached))
        usage = Usage(len(prompt), len(output), cached)
        router.leases.finish(lease, now + 0.5, Outcome.DONE, usage)
        index.drop_ended()
        index.drop_ended()
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(prog="cached_predictions")
    parser.add_argument("--blocks", default="16,32,128")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    traffic = Traffic(args.seed).mixed(args.rounds)
    layout = Table(box=box.MARKDOWN)
    for heading in ("block", "requests", "cached", "within one block", "mean error", "worst"):
        layout.add_column(heading, justify="right" if layout.columns else "left")
    for block in map(int, args.blocks.split(",")):
        tokens = play(traffic, block)
        tokens["all"] = [pair for of_kind in tokens.values() for pair in of_kind]
        for kind, pairs in tokens.items():
            errors = [abs(predicted - cached) for predicted, cached in pairs]
            layout.add_row(
                f"{block} {kind}", str(len(pairs)), str(sum(cached > 0 for _, cached in pairs)),
                f"{sum(error <= block for error in errors) / len(pairs):.1%}",
                f"{sum(errors) / len(errors):.0f}", str(max(errors)),
            )  # fmt: skip
    Console().print(layout)


if __name__ == "__main__":
    main()
