"""A metrics page as vLLM 0.32 writes it."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

LABELS = ("model_name", "engine")
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
COUNTERS = (
    "prefix_cache_queries", "prefix_cache_hits", "external_prefix_cache_queries",
    "external_prefix_cache_hits", "mm_cache_queries", "mm_cache_hits", "num_preemptions",
    "prompt_tokens", "prompt_tokens_cached", "generation_tokens", "corrupted_requests",
)  # fmt: skip
HISTOGRAMS = (
    "request_prompt_tokens", "request_generation_tokens", "iteration_tokens_total",
    "request_max_num_generation_tokens", "request_params_n", "request_params_max_tokens",
    "time_to_first_token_seconds", "inter_token_latency_seconds",
    "request_time_per_output_token_seconds", "e2e_request_latency_seconds",
    "request_queue_time_seconds", "request_inference_time_seconds",
    "request_prefill_time_seconds", "request_decode_time_seconds", "request_num_preemptions",
    "request_prefill_kv_computed_tokens",
)  # fmt: skip
BUCKETS = (1, 5, 10)
STARTED = 1_700_000_000.0


@dataclass(frozen=True)
class Engine:
    """The numbers that an engine reports."""

    running: int = 0
    waiting: int = 0
    usage: float = 0.0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    fetching: int = 0  # part of `waiting`


def vllm_page(
    *engines: Engine,
    model: str = "tiny",
    num_blocks: int | None = 1000,
    block_size: int = 16,
    started: float | None = STARTED,
) -> bytes:
    registry = CollectorRegistry()
    if started:
        Gauge("process_start_time_seconds", "Start time.", registry=registry).set(started)
    gauges = {n: Gauge(f"vllm:{n}", "A gauge.", LABELS, registry=registry) for n in GAUGES}
    reasons = Gauge(
        "vllm:num_requests_waiting_by_reason", "By reason.", [*LABELS, "reason"], registry=registry
    )
    counters = {n: Counter(f"vllm:{n}", "A count.", LABELS, registry=registry) for n in COUNTERS}
    sources = Counter(
        "vllm:prompt_tokens_by_source", "By source.", [*LABELS, "source"], registry=registry
    )
    for name in HISTOGRAMS:
        histogram = Histogram(f"vllm:{name}", "Many.", LABELS, registry=registry, buckets=BUCKETS)
        for index in range(len(engines)):
            histogram.labels(model, str(index)).observe(7)
    config = Gauge(
        "vllm:cache_config_info",
        "Information of the LLMEngine CacheConfig",
        ["block_size", "engine", "kv_cache_size_tokens", "num_gpu_blocks", "sliding_window"],
        registry=registry,
    )
    for index, engine in enumerate(engines):
        labels = model, str(index)
        gauges["num_requests_running"].labels(*labels).set(engine.running)
        gauges["num_requests_waiting"].labels(*labels).set(engine.waiting)
        gauges["kv_cache_usage_perc"].labels(*labels).set(engine.usage)
        reasons.labels(*labels, "capacity").set(engine.waiting - engine.fetching)
        reasons.labels(*labels, "deferred").set(engine.fetching)
        sources.labels(*labels, "local_compute").inc(77)
        counters["prompt_tokens"].labels(*labels).inc(engine.prompt_tokens)
        counters["generation_tokens"].labels(*labels).inc(engine.generation_tokens)
        # Tokens are of this engine, blocks of all engines.
        tokens = num_blocks and num_blocks * block_size
        blocks = num_blocks and num_blocks * len(engines)
        config.labels(str(block_size), str(index), str(tokens), str(blocks), "None").set(1)
    return generate_latest(registry)
