"""The numbers read from a worker's metrics page."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from proxy.core.model.specs import Gauges
from proxy.health.worker_metrics import parse
from tests.present import present
from tests.proxy.health.vllm_page import STARTED, Engine, vllm_page

BUSY = Engine(running=3, waiting=5, usage=0.25, prompt_tokens=1000, generation_tokens=200)
PAGE = vllm_page(BUSY)
ONE = b'vllm:num_requests_running{engine="0"} '


def read(page: bytes, at: float = 0.0, **options: bool) -> Gauges:
    return present(parse(page, at=at, **options))


def test_fetching_requests_do_not_count_as_queued() -> None:
    page = vllm_page(Engine(waiting=5, fetching=3), Engine(waiting=4, fetching=0))
    moving, plain = (read(page, moves=moves) for moves in (True, False))
    assert (moving.waiting, moving.extra["queued"]) == (9, 6)
    assert "queued" not in plain.extra


def test_unknown_cache_size_is_none() -> None:
    assert read(vllm_page(BUSY, num_blocks=None)).kv_capacity_tokens is None


def test_missing_start_time_is_left_out() -> None:
    assert read(vllm_page(BUSY, started=None)).extra == {"queued": 5}


POLICY_METRICS = b"""\
# TYPE vllm_sched_start_time_seconds gauge
vllm_sched_start_time_seconds{engine="0",model_name="tiny"} 1.5e+09
# TYPE vllm_sched_prefill_backlog_tokens gauge
vllm_sched_prefill_backlog_tokens{class="long",engine="0",model_name="tiny"} 9000.0
vllm_sched_prefill_backlog_tokens{class="short",engine="0",model_name="tiny"} 200.0
vllm_sched_prefill_backlog_tokens{class="long",engine="1",model_name="tiny"} 1000.0
vllm_sched_prefill_backlog_tokens{class="all",engine="1",model_name="a,class=\\"long\\""} 5.0
"""


def test_prefill_backlog_of_our_policies_is_read() -> None:
    gauges = read(vllm_page(BUSY) + POLICY_METRICS)
    backlog = {"backlog": 10_205, "backlog_long": 10_000}
    assert gauges.extra == {"started": STARTED, "queued": 5} | backlog


def test_start_time_of_our_policies_is_the_fallback() -> None:
    assert read(vllm_page(BUSY, started=None) + POLICY_METRICS).extra["started"] == 1.5e9


MOVED = b'vllm:nixl_bytes_transferred_sum{engine="0"} 4096.0\n'


def test_transferred_bytes_are_read_with_a_connector() -> None:
    page = vllm_page(BUSY) + MOVED
    moving, plain = (read(page, moves=moves) for moves in (True, False))
    assert (moving.extra["kv_bytes"], "kv_bytes" in plain.extra) == (4096, False)


@pytest.mark.parametrize("after", [b"", b"# TYPE http_requests_total counter\n" + b"x 1\n" * 50])
def test_cache_size_is_found_anywhere_on_the_page(after: bytes) -> None:
    assert read(vllm_page(BUSY, BUSY, BUSY) + after).kv_capacity_tokens == 48_000


CONFIG = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="4"} 1.0\n'
RUNNING_HELP = b"# TYPE vllm:num_requests_running gauge\n"
CONFIG_WITH_TOKENS = CONFIG.replace(b"{", b'{kv_cache_size_tokens="25",')
CONFIG_WITHOUT_TOKENS = CONFIG.replace(b"{", b'{kv_cache_size_tokens="None",')


@pytest.mark.parametrize(
    ("line", "tokens"), [(CONFIG, 64), (CONFIG_WITHOUT_TOKENS, 64), (CONFIG_WITH_TOKENS, 50)]
)
def test_tokens_are_summed_over_engines_and_blocks_are_not(line: bytes, tokens: int) -> None:
    assert read(ONE + b"3\n" + line * 2).kv_capacity_tokens == tokens


def test_idle_engine_may_report_only_its_cache() -> None:
    help_alone = RUNNING_HELP + b"# TYPE vllm:cache_config_info gauge\n"
    assert parse(help_alone, at=0) is None
    gauges = read(help_alone + CONFIG_WITH_TOKENS)
    assert (gauges.running, gauges.kv_usage, gauges.kv_capacity_tokens) == (0, 0.0, 25)


@pytest.mark.parametrize(
    "line", [ONE + b"3", ONE + b"3.0 1700000000000\n", b"\n\n" + ONE + b"3e0\n", ONE + b"3\r\n"]
)
def test_line_formats_are_accepted(line: bytes) -> None:
    assert read(line).running == 3


@pytest.mark.parametrize("value", [b"", b"NaN", b"+Inf", b"-1", b"1e300", b"x", b"0x3", b"\xff"])
def test_invalid_numbers_are_left_out(value: bytes) -> None:
    assert parse(ONE + value, at=0) is None
    assert read(ONE + b"3\n" + ONE + value).running == 3


@pytest.mark.parametrize(
    "page", [b"", b"<html>vllm:num_requests_running{</html>", b"vllm:num_requests_running_x{} 1"]
)
def test_other_pages_have_no_gauges(page: bytes) -> None:
    assert parse(page, at=0) is None


@settings(deadline=None)  # for busy machines
@given(st.binary(), st.integers(0, 2000), st.integers(0, 50))
def test_damaged_page_never_raises(junk: bytes, at: int, removed: int) -> None:
    start = PAGE.index(b"# HELP vllm:num_requests_running") + at
    parse(PAGE[:start] + junk + PAGE[start + removed :], at=0)


ENGINES = st.builds(
    Engine,
    running=st.integers(0, 2000),
    waiting=st.integers(0, 10**6),
    usage=st.floats(0, 1),
    prompt_tokens=st.integers(0, 10**15),
    generation_tokens=st.integers(0, 10**15),
)


@settings(deadline=None, max_examples=25)
@given(st.lists(ENGINES, min_size=1, max_size=3), st.text(max_size=20))
@example([BUSY], 'a "} 9')
@example([BUSY, Engine(running=1, usage=0.75)], "c\nvllm:num_requests_running{} 9")
@example([BUSY], "d}{e f\\")
def test_parser_agrees_with_the_prometheus_library(engines: list[Engine], model: str) -> None:
    page = vllm_page(*engines, model=model)
    totals: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            totals[sample.name] += sample.value
    assert read(page, at=12.5) == Gauges(
        at=12.5,
        running=int(totals["vllm:num_requests_running"]),
        waiting=int(totals["vllm:num_requests_waiting"]),
        kv_usage=totals["vllm:kv_cache_usage_perc"] / len(engines),
        kv_capacity_tokens=16_000 * len(engines),
        prompt_tokens_total=totals["vllm:prompt_tokens_total"],
        generation_tokens_total=totals["vllm:generation_tokens_total"],
        extra={"started": STARTED, "queued": sum(engine.waiting for engine in engines)},
    )
