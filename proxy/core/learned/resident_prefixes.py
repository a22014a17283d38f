"""The prompt prefixes that one engine's KV cache holds, as its journal reports them.

Idea: the engine reports tokens, the index has hashes of bytes. Each request has both sizes, so a
share of its tokens is the same share of its bytes. The hashes travel as the name of the request.

Two kinds of points are exact: where prompts went apart before, the engine has reported the cached
tokens, and where a prompt ended, its size and its response. A longer prompt is expected to contain
the response, unless most prompts lately did not.

Cost: a few look-ups per block that an engine caches or evicts.

How it fails: a block of bytes counts as evicted when a part of it is. Where prompts first go apart,
tokens are interpolated.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from struct import Struct, error, pack, unpack

from proxy.core.learned.bytes_per_token import MAX_BYTES_PER_TOKEN, MIN_BYTES_PER_TOKEN
from proxy.core.learned.prefix_index import COVERED, ENDS, PrefixIndex

VERSION = 2  # of blocks and names
LEARNING_RATE = 0.25  # of the share of responses that are found
HEAD = Struct("<BII")  # version, bytes of the prompt, and of tools before it


@dataclass(slots=True, eq=False)
class NamedPrompt:
    hashes: tuple[int, ...]
    prompt_bytes: int
    bytes_before: int
    prompt_tokens: int
    end: int = 0  # tokens that the cache holds of the prompt and its response

    def whole_blocks(self, tokens: int, block_tokens: int) -> int:
        """Return the blocks of bytes that the first tokens cover."""
        if tokens + block_tokens > self.prompt_tokens:
            return len(self.hashes)
        return min(bisect_right(ENDS, self._bytes(tokens)), len(self.hashes))

    def touched_blocks(self, first: int, last: int, block_tokens: int) -> range:
        """Return the blocks of bytes with a part of the tokens."""
        end = len(self.hashes)
        if last + block_tokens <= self.prompt_tokens:
            end = min(bisect_left(COVERED, self._bytes(last)), end)
        return range(min(bisect_right(ENDS, self._bytes(first)), end), end)

    def _bytes(self, tokens: int) -> float:
        before = self.bytes_before
        return tokens * (before + self.prompt_bytes) / self.prompt_tokens - before


class ResidentPrefixes:
    def __init__(self, index: PrefixIndex, worker: int) -> None:
        self.block_tokens = 1  # of the engine
        self.others: list[ResidentPrefixes] = []  # of the worker's other engines
        self._index = index
        self._worker = worker
        self._prompts: dict[int, NamedPrompt] = {}  # by the engine's number of the request
        self._resident: dict[int, int] = {}  # tokens of requests without a name
        self._found: dict[int, int] = {}  # at their start
        self._ends: dict[int, NamedPrompt] = {}  # the last prompt that ended with a block
        self._responses_found = 1.0  # share, learned
        self._blocks: dict[int, int] = {}  # with the request that held each first
        self._lost: tuple[int, ...] = ()  # blocks when the journal was read last

    def __len__(self) -> int:
        return len(self._blocks)

    def restart(self, block_tokens: int) -> None:
        self.clear()
        self._prompts.clear()
        self.block_tokens = block_tokens
        self._index.follow(self._worker)
        self._index.stop_expecting(self._lost, self._worker)
        self._lost = ()

    def add_name(self, number: int, name: bytes, prompt_tokens: int) -> None:
        """Note the hashes of a request once; a name that is not ours is ignored."""
        if number in self._prompts:
            return
        prompt = prompt_of(name, prompt_tokens)
        if prompt is None:
            return
        self._prompts[number] = prompt
        if (cached := self._found.pop(number, -1)) >= 0:
            self.record_found(number, cached)
        if resident := self._resident.pop(number, 0):
            self.record_resident(number, resident)

    def record_found(self, number: int, tokens: int) -> None:
        """Note how many tokens of a request the cache held when it started."""
        if (prompt := self._prompts.get(number)) is None:
            self._found[number] = tokens
            return
        hashes = prompt.hashes
        depth = bisect_left(hashes, True, key=self._lacks)
        if not depth:
            return
        last = hashes[depth - 1]
        earlier = self._ends.get(last)
        if earlier is None or not self._extends_prompt(earlier, prompt, tokens):
            self._index.record_fork(last, self._worker, tokens)

    def record_resident(self, number: int, tokens: int) -> None:
        if (prompt := self._prompts.get(number)) is None:
            self._resident[number] = tokens
            return
        blocks, hashes, index = self._blocks, prompt.hashes, self._index
        whole = range(prompt.whole_blocks(tokens, self.block_tokens))
        if missing := [at for at in whole if hashes[at] not in blocks]:
            reported, before = index.reported_prefix(hashes)
            begin = COVERED[reported] if reported else -prompt.bytes_before
            left = prompt.prompt_tokens - before
            per_byte = left / max(prompt.prompt_bytes - begin, 1)
            is_text = 1 / MAX_BYTES_PER_TOKEN <= per_byte <= 1 / MIN_BYTES_PER_TOKEN
            for at in missing:
                blocks[hashes[at]] = number
                after = max(COVERED[at + 1] - begin, 0)
                size = before + int(after * per_byte) if is_text else -1
                index.add_block(hashes[at], self._worker, size)
        if hashes and tokens + self.block_tokens > prompt.prompt_tokens:
            self._record_ends(prompt, tokens)

    def _extends_prompt(self, earlier: NamedPrompt, prompt: NamedPrompt, cached: int) -> bool:
        """Return whether a prompt begins with a whole one; learn if it found its response."""
        block, size = self.block_tokens, earlier.prompt_tokens
        if prompt.prompt_bytes <= earlier.prompt_bytes or cached < size // block * block:
            return False
        may_have_it = cached > size or prompt.prompt_tokens > earlier.end
        if earlier.end - size > block and may_have_it:
            has_response = cached > size
            self._responses_found += LEARNING_RATE * (has_response - self._responses_found)
        return True

    def _record_ends(self, prompt: NamedPrompt, tokens: int) -> None:
        """Note the cached tokens of prompts that begin with this one."""
        last, prompt.end = prompt.hashes[-1], tokens
        self._ends[last] = prompt
        end = tokens if self._responses_found > 0.5 else min(tokens, prompt.prompt_tokens)
        self._index.record_prompt_end(last, self._worker, end)

    def record_evicted(self, number: int, first: int, last: int) -> None:
        if (prompt := self._prompts.get(number)) is None:
            self._resident[number] = min(self._resident.get(number, 0), first)
            return
        if prompt.hashes and first < prompt.end and self._ends.get(prompt.hashes[-1]) is prompt:
            self._record_ends(prompt, first)
        for at in prompt.touched_blocks(first, last, self.block_tokens):
            self._remove_block(prompt.hashes[at])

    def clear(self) -> None:
        self._resident.clear()
        self._found.clear()
        for block in [*self._blocks]:
            self._remove_block(block)

    def stop_claiming(self) -> None:
        """Only expect what the cache held last, because the journal is not read any more."""
        blocks = self._lost + tuple(self._blocks)
        self._lost = ()
        self.restart(self.block_tokens)
        self._lost = blocks
        self._index.unfollow(self._worker)
        self._index.expect(blocks, self._worker)

    def unfollow(self) -> None:
        """Claim nothing from now on: the worker was removed, and its place may be taken."""
        self.restart(self.block_tokens)
        self._index.unfollow(self._worker)
        self._index = PrefixIndex()

    def forget(self, number: int) -> None:
        """Drop what only this request's bytes stand for; no later report would name them."""
        self._resident.pop(number, None)
        self._found.pop(number, None)
        if (prompt := self._prompts.pop(number, None)) is not None:
            for block in prompt.hashes:
                if self._blocks.get(block) == number:
                    self._remove_block(block)

    def _lacks(self, block: int) -> bool:
        return block not in self._blocks

    def _remove_block(self, block: int) -> None:
        if self._blocks.pop(block, None) is None:
            return
        self._ends.pop(block, None)
        if not any(block in other._blocks for other in self.others):
            self._index.remove_block(block, self._worker)


def name_of(hashes: tuple[int, ...], prompt_bytes: int, bytes_before: int = 0) -> bytes:
    """Return the name under which an engine reports a request."""
    return HEAD.pack(VERSION, prompt_bytes, bytes_before) + pack(f"<{len(hashes)}Q", *hashes)


def prompt_of(name: bytes, prompt_tokens: int) -> NamedPrompt | None:
    try:
        version, prompt_bytes, bytes_before = HEAD.unpack_from(name)
        hashes = unpack(f"<{(len(name) - HEAD.size) // 8}Q", name[HEAD.size :])
    except error:
        return None
    if version != VERSION or not prompt_bytes or not prompt_tokens:
        return None
    return NamedPrompt(hashes, prompt_bytes, bytes_before, prompt_tokens)
