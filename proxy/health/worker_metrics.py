"""Read a worker's /metrics: the few lines that are wanted, found by bytes, nothing else looked at.

A vLLM page is 100 KB and more of histograms, and is read from every worker every second on the
event loop that relays the streams: a full parser needs 10 ms for it, this one 0.05 ms. Most of that
is to look for lines that are not there, or stand last.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from proxy.core.fleet.slots import QUEUED_GAUGE
from proxy.core.model.specs import Gauges

# With what ends the name, as longer names begin with these.
RUNNING = b"vllm:num_requests_running{"
WAITING = b"vllm:num_requests_waiting{"
WAITING_WHY = b"vllm:num_requests_waiting_by_reason{"
KV_USAGE = b"vllm:kv_cache_usage_perc{"
CACHE_CONFIG = b"vllm:cache_config_info{"
PROMPT_TOKENS = b"vllm:prompt_tokens_total{"
GENERATION_TOKENS = b"vllm:generation_tokens_total{"
PREEMPTIONS = b"vllm:num_preemptions_total{"
KV_BYTES = b"vllm:nixl_bytes_transferred_sum{"
# Not vLLM's: when the process came up. Told by one whose engine counts in the same process, or by
# vllm-sched's own engines.
STARTED = b"process_start_time_seconds "
ENGINES_STARTED = b"vllm_sched_start_time_seconds{"
# Told by vllm-sched's engines alone: prompt tokens still to compute, and those of long prompts.
BACKLOG = b"vllm_sched_prefill_backlog_tokens{"
CAPACITY = re.compile(rb'[{,]reason="capacity"')
LONG = re.compile(rb'[{,]class="long"')

ABSURD = 1e18

BLOCK_SIZE = re.compile(rb'[{,]block_size="(\d{1,9})"')
NUM_BLOCKS = re.compile(rb'[{,]num_gpu_blocks="(\d{1,12})"')
SIZE_TOKENS = re.compile(rb'[{,]kv_cache_size_tokens="(\d{1,15})"')


def parse(page: bytes, at: float, *, moves: bool = True) -> Gauges | None:
    """Return what the page says at time `at`; None if it is no vLLM page.

    The engines of a data-parallel worker are summed, their cache usage averaged. `moves`: whether
    it may have moved KV cache.
    """
    running, room = values(page, RUNNING), capacity(page)
    if not running and room is None:
        return None  # of an engine that has had nothing to do, its cache alone may be told
    usage = values(page, KV_USAGE)
    started = sum(values(page, STARTED)) or sum(values(page, ENGINES_STARTED))
    extra = {"started": started} if started else {}
    if backlog := values(page, BACKLOG):
        extra["backlog"] = sum(backlog)
        extra["backlog_long"] = sum(values(page, BACKLOG, LONG))
    # Else those whose KV cache is on its way count among those that wait.
    if moves and (queued := values(page, WAITING_WHY, CAPACITY)):
        extra[QUEUED_GAUGE] = sum(queued)
    if moves and (moved := values(page, KV_BYTES)):
        extra["kv_bytes"] = sum(moved)
    return Gauges(
        at=at,
        running=int(sum(running)),
        waiting=int(sum(values(page, WAITING))),
        kv_usage=sum(usage) / len(usage) if usage else 0.0,
        kv_capacity_tokens=room,
        prompt_tokens_total=sum(values(page, PROMPT_TOKENS)),
        generation_tokens_total=sum(values(page, GENERATION_TOKENS)),
        preemptions_total=sum(values(page, PREEMPTIONS)),
        extra=extra,
    )


def lines(page: bytes, start: bytes) -> Iterator[bytes]:
    """Yield the lines of a metric; they stand together, after its HELP and TYPE."""
    at = 0 if page.startswith(start) else page.find(b"\n" + start) + 1
    while page.startswith(start, at):
        end = page.find(b"\n", at)
        if end < 0:
            yield page[at:]
            return
        yield page[at:end]
        at = end + 1


def values(page: bytes, start: bytes, having: re.Pattern[bytes] | None = None) -> list[float]:
    """Return a metric's numbers, one per engine; lines that make no sense are left out."""
    found = []
    for line in lines(page, start):
        if having is not None and not having.search(line):
            continue
        # A label's value may hold blanks and braces, what follows the labels never.
        fields = line[max(line.rfind(b"}") + 1, len(start)) :].split()
        try:
            value = float(fields[0])
        except (IndexError, ValueError):
            continue
        if 0 <= value < ABSURD:
            found.append(value)
    return found


def capacity(page: bytes) -> int | None:
    """Return how many tokens the KV cache holds, over all engines; None if that is not told.

    Of tokens, an engine's line says how many it has; of blocks, how many all of them have.
    """
    told = in_blocks = 0
    # Told once all is set up, they are among the last; other engines' stand before the last one.
    last = page.rfind(b"\n" + CACHE_CONFIG) + 1
    first = page.rfind(b"\n#", 0, last) + 1
    for line in lines(page[first:], CACHE_CONFIG):
        if tokens := SIZE_TOKENS.search(line):
            told += int(tokens[1])
        size, blocks = BLOCK_SIZE.search(line), NUM_BLOCKS.search(line)
        if size and blocks:
            in_blocks = max(in_blocks, int(size[1]) * int(blocks[1]))
    return told or in_blocks or None
