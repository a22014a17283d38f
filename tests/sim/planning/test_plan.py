"""Plans: the best of fleets with a known order, and refusals."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.core.model.role import Role
from tests.cost.linear_times import LINEAR_8B
from tests.present import present
from vllm_sched.bench.results.goodput import parse
from vllm_sched.bench.results.outcome import Outcome
from vllm_sched.bench.traffic.catalogue import find
from vllm_sched.bench.traffic.schedule import Schedule
from vllm_sched.cli.fleet.fleet import note_missing_limits, note_narrow_workers, read
from vllm_sched.cost.transfer import TransferTime
from vllm_sched.errors import UsageError
from vllm_sched.sim.engines import exact_engine
from vllm_sched.sim.engines.quantile_sketch import QuantileSketch
from vllm_sched.sim.fleet.figures import ClassFigures, FlowResult
from vllm_sched.sim.fleet.models import of_profile
from vllm_sched.sim.planning import exact_check
from vllm_sched.sim.planning.fleet_file import write
from vllm_sched.sim.planning.fleet_shapes import (
    BOTH,
    CHUNKS,
    DEFAULT,
    LONG_PROMPT,
    ONE_POOL,
    POLICIES,
    PREFILL_DECODE,
    SHORT_APART,
    SHORT_LONG,
    FleetShape,
    SplitHints,
    shapes,
)
from vllm_sched.sim.planning.plan import plan
from vllm_sched.sim.planning.progress import PlanProgress
from vllm_sched.sim.planning.question import PlanQuestion
from vllm_sched.sim.planning.search import FleetSearch, ServedRate, rank_fleets
from vllm_sched.sim.planning.trials import LONG, REST, longest_kept

SLOW_LINK = TransferTime(0.05, 0.0, 1 / 0.5e9)
LONGS = "300x60:0.95,40000x20:0.05"
NOTHING = FlowResult(ClassFigures(), {}, 1.0, 1.0, QuantileSketch())


def question(workload: str, targets: str, **given: Any) -> PlanQuestion:
    """Return a coarse question about H100s with an 8B model."""
    link = given.pop("transfer", TransferTime(0.002, 0.0, 1 / 87e9))
    settings: dict[str, Any] = {
        "source": find(workload),
        "machine": replace(of_profile("h100-8b"), time=LINEAR_8B, transfer=link),
        "targets": parse(targets.split()), "policies": (DEFAULT,), "effort": 0.2, "draws": 3,
    }  # fmt: skip
    return PlanQuestion(**settings | given)


def families(ranking: list[ServedRate]) -> list[str]:
    return [served.shape.family for served in ranking]


def assert_no_split_is_better(search: FleetSearch, best: ServedRate, *splits: FleetShape) -> None:
    """Check that no split of the workers, searched or not, is much better than the best."""
    for each in splits:
        split = replace(each, policy=best.shape.policy)
        served = search.judge(split, best.rate, min_rate=best.rate)
        assert served is None or served.rate <= 1.06 * best.rate, split


def test_one_pool_is_best_for_short_prompts() -> None:
    found = plan(question("1500x60", "ttft:500 tpot:40", effort=0.05, draws=2), 3)
    assert families(found.ranking) == [ONE_POOL, PREFILL_DECODE]  # no boundary to try
    assert found.best.shape.pools == {Role.GENERAL: 3}
    assert present(found.fewer).rate < found.best.rate < present(found.more).rate
    assert found.best.run.all.share >= 0.9


def test_few_very_long_prompts_get_their_own_pool() -> None:
    # Shorts must not wait behind a long prompt, and the link is too slow for hand-overs.
    search = FleetSearch(question(LONGS, "ttft:250", transfer=SLOW_LINK, effort=0.1, draws=2))
    ranking = search.best(3)
    best = ranking[0]
    assert families(ranking)[0] == SHORT_LONG
    assert best.shape.short_limit in range(360, 40_020)
    limits = {1000, best.shape.short_limit, 39_000}
    assert_no_split_is_better(
        search, best,
        *(FleetShape(short=3 - n, long=n, short_limit=limit) for n in (1, 2) for limit in limits),
    )  # fmt: skip
    (one_pool,) = (served for served in ranking if served.shape.family == ONE_POOL)
    assert best.rate > 1.3 * one_pool.rate
    assert len(best.shares) == len(one_pool.shares) == 2


def test_large_prompts_with_small_gaps_get_a_prefill_pool() -> None:
    search = FleetSearch(question("8000x100", "ttft:4000 tpot:20", effort=0.15, draws=2))
    best, *others = search.best(3)
    assert best.shape.family == PREFILL_DECODE
    assert_no_split_is_better(search, best, *(FleetShape(prefill=n, decode=3 - n) for n in (1, 2)))
    assert best.rate > 1.2 * others[0].rate
    assert best.run.all.handed_over > 0


def test_policy_can_replace_a_second_pool() -> None:
    policies = (DEFAULT, LONG_PROMPT)
    asked = question(
        LONGS, "ttft:250", families=(ONE_POOL,), policies=policies, effort=0.1, draws=2
    )
    best = FleetSearch(asked).best(2)[0]
    assert best.shape.policy == LONG_PROMPT


class Rated:
    """A search whose rates are given by shape; it records the shapes that it rates and judges."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tried: list[FleetShape] = []
        self.judged: list[FleetShape] = []
        self.compared: list[FleetShape] = []  # by the hardest draw
        self.rate_of: Callable[[FleetShape], float]
        self.judge: Callable[[FleetShape], float] | None = None

        def rated(
            _: FleetSearch, shape: FleetShape, _start: float, *, min_rate: float = 0.0, step: float
        ) -> Any:
            assert step > 1
            self.tried.append(shape)
            return self._served(shape, self.rate_of(shape), min_rate)

        def judged(
            _: FleetSearch, shape: FleetShape, _start: float, *, min_rate: float = 0.0,
            max_rate: float = math.inf, draws: int | None = None,
        ) -> Any:  # fmt: skip
            hardest = draws == 1
            (self.compared if hardest else self.judged).append(shape)
            rate_of = self.rate_of if hardest else self.judge or self.rate_of
            return self._served(shape, min(rate_of(shape), max_rate), min_rate)

        monkeypatch.setattr(FleetSearch, "rough_rate", rated)
        monkeypatch.setattr(FleetSearch, "judge", judged)

    @staticmethod
    def _served(shape: FleetShape, rate: float, min_rate: float) -> ServedRate | None:
        return ServedRate(shape, rate, NOTHING) if rate >= min_rate else None


@pytest.fixture
def rated(monkeypatch: pytest.MonkeyPatch) -> Rated:
    return Rated(monkeypatch)


@pytest.mark.parametrize(("rate", "place"), [(9.5, None), (9.7, 3), (10.3, 3), (10.5, 0)])
def test_short_pool_beside_prefill_and_decode_must_serve_the_best_rate(
    rated: Rated, rate: float, place: int | None
) -> None:
    def families_of(workers: int) -> list[str]:
        return families(FleetSearch(question(LONGS, "ttft:250")).best(workers))

    rated.rate_of = lambda shape: (
        (rate if shape.family == SHORT_APART else 10.0) * shape.workers / 4
    )
    others = [ONE_POOL, SHORT_LONG, PREFILL_DECODE]
    assert families_of(2) == others  # it needs three workers
    wanted = others if place is None else [*others[:place], SHORT_APART, *others[place:]]
    assert families_of(4) == wanted
    # With three workers the other rates differ.
    assert (SHORT_APART in families_of(3)) == (place is not None)


def test_search_for_one_more_worker_requires_a_higher_rate(rated: Rated) -> None:
    search = FleetSearch(question("300x60", "ttft:500"))
    best = ServedRate(FleetShape(prefill=1, decode=1), 10.0, NOTHING)
    rates = {(2, 1): 9.9, (1, 2): 12.0}
    rated.rate_of = lambda shape: rates[shape.prefill, shape.decode]
    found = present(search.with_one_more(best))
    assert (found.shape, found.rate) == (FleetShape(prefill=1, decode=2), 12.0)
    assert [(each.prefill, each.decode) for each in rated.compared[:2]] == [(2, 1), (1, 2)]
    assert rated.judged == [found.shape]
    rates[1, 2] = 10.0
    assert search.with_one_more(best) is None


def test_one_pool_when_there_are_too_few_workers_for_several(rated: Rated) -> None:
    search = FleetSearch(question("300x60", "ttft:500", policies=(DEFAULT, BOTH)))
    best = ServedRate(FleetShape(prefill=1, decode=1), 10.0, NOTHING)
    rated.rate_of = lambda _: 4.0
    fewer = present(search.with_one_fewer(best))
    assert (fewer.shape.pools, fewer.shape.policy, fewer.rate) == ({Role.GENERAL: 1}, BOTH, 4.0)
    assert search.with_one_fewer(fewer) is None


def test_families_behind_the_best_are_judged_by_fewer_runs(rated: Rated) -> None:
    rates = {ONE_POOL: 9.5, SHORT_LONG: 10.0, PREFILL_DECODE: 5.0, SHORT_APART: 1.0}
    rated.rate_of = lambda shape: rates[shape.family]
    search = FleetSearch(question(LONGS, "ttft:250"))
    assert [each.shape.family for each in search.best(4)] == [SHORT_LONG, ONE_POOL, PREFILL_DECODE]
    assert search.best(4, floor=10.1) == []
    assert [each.rate for each in search.best(4, floor=9.9)] == [10.0, 9.5, 5.0]


def test_second_machine_must_exceed_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    floors: list[float] = []
    best = FleetSearch.best

    def recorded(search: FleetSearch, gpus: int, floor: float = 0.0) -> list[ServedRate]:
        floors.append(floor)
        return best(search, gpus, floor)

    monkeypatch.setattr(FleetSearch, "best", recorded)
    asked = question("1500x60", "ttft:500 tpot:40", effort=0.05, draws=2)
    slower = replace(asked.machine, profile="slower", time=replace(LINEAR_8B, decode_fixed_s=0.009))
    found = plan(asked, 2, machines=[slower, asked.machine])
    assert found.question.machine == asked.machine
    assert floors == [0.0, found.best.rate]


def test_best_policy_is_chosen(rated: Rated) -> None:
    rates = dict(zip(POLICIES, (5.0, 9.5, 9.9, 10.0), strict=True))
    # The rate falls with the size of the long pool.
    rated.rate_of = lambda shape: rates[shape.policy] / (1 + shape.long / 1000)
    search = FleetSearch(question(LONGS, "ttft:250", families=(SHORT_LONG,), policies=POLICIES))
    best, *_ = search.best(4)
    assert best.shape.policy == CHUNKS
    assert rated.judged == [best.shape]
    # Only policies close to the best are compared, each with its best shape.
    assert {each.policy for each in rated.compared} == {CHUNKS, BOTH}
    assert len(rated.compared) <= 5


def test_next_finalist_is_judged_if_the_best_by_one_draw_fails_others(rated: Rated) -> None:
    rated.rate_of = lambda shape: 10.0 + shape.long
    rated.judge = lambda shape: 5.0 if shape == rated.judged[0] else 10.0
    best, *_ = FleetSearch(question(LONGS, "ttft:250", families=(SHORT_LONG,))).best(4)
    assert best.shape != rated.judged[0] == rated.compared[0]
    assert best.rate == 10.0


def test_policy_without_effect_is_not_chosen(rated: Rated) -> None:
    # All rates are equal, but the rough search prefers later shapes.
    after = iter(range(100))
    rated.rate_of = lambda _: 10.0 * 1.015 ** next(after)
    rated.judge = lambda _: 10.0
    search = FleetSearch(question(LONGS, "ttft:250", families=(ONE_POOL,), policies=POLICIES))
    best, *_ = search.best(2)
    assert best.shape.policy == DEFAULT


def test_short_pool_beside_prefill_and_decode_serves_shorts() -> None:
    given = {"families": (SHORT_APART,), "effort": 0.15, "draws": 2}
    best, *_ = FleetSearch(question("300x60:0.9,20000x100:0.1", "ttft:2500 tpot:20", **given)).best(
        3
    )
    assert best.shape.pools == {Role.SHORT: 1, Role.PREFILL: 1, Role.DECODE: 1}
    figures = best.run.classes
    # Longs are handed over, shorts are not.
    assert figures[LONG].handed_over > 0.5 * figures[LONG].done
    assert figures[REST].handed_over < 0.1 * figures[REST].done
    assert best.run.all.share >= 0.9


def test_starved_long_prompts_fail_despite_a_high_total_share() -> None:
    asked = question(LONGS, "ttft:250", transfer=SLOW_LINK)
    search = FleetSearch(asked)
    shape = FleetShape(short=1, long=1, short_limit=2000)
    served = present(search.rough_rate(shape, 2.0))
    beyond = search.trials.play(shape, served.rate * 3, fine=False, whole=True)
    # Shorts are more than nine requests in ten.
    assert beyond.classes["rest"].share > 0.9 > beyond.classes["long"].kept_share


@pytest.mark.parametrize(
    ("workload", "of_300", "of_20000"),
    [
        ("300x60:0.95,20000x20:0.05", REST, LONG),
        # More than a tenth have the greatest length.
        ("300x60:0.8,20000x20:0.2", REST, LONG),
        ("300x60:0.1,20000x20:0.9", REST, LONG),
        ("20000x20", REST, REST),
    ],
)
def test_longest_prompts_are_a_class_of_their_own(
    workload: str, of_300: str, of_20000: str
) -> None:
    search = FleetSearch(question(workload, "ttft:2500"))
    assert [search.trials.class_of(tokens) for tokens in (300, 20_000)] == [of_300, of_20000]


@pytest.mark.parametrize("targets", ["ttft:250", "ttft:1000 tpot:12", "e2el:1500", "itl:60"])
def test_run_that_stops_early_would_have_failed(targets: str) -> None:
    search = FleetSearch(question(LONGS, targets))
    shape = FleetShape(general=2)
    served = present(search.rough_rate(shape, 10.0))
    spared = 0
    for load in (1.0, 1.15, 3.0):
        rate = load * served.rate
        run, whole = (
            search.trials.play(shape, rate, fine=False, whole=each) for each in (False, True)
        )
        assert not whole.failed
        assert search.trials.is_good_enough(run, strict=False) == search.trials.is_good_enough(
            whole, strict=False
        )
        if run.failed:
            spared += whole.all.done - run.all.done
        else:
            assert (run.all.kept, run.gaps.bins) == (whole.all.kept, whole.gaps.bins)
    assert spared > 100


def test_returned_rate_holds_for_other_draws() -> None:
    # One prompt in twenty makes most of the work, so draws differ by half.
    asked = question(LONGS, "ttft:500", draws=6)
    shape, search = FleetShape(general=2), FleetSearch(asked)
    found = present(search.judge(shape, 4.0))
    assert len(found.shares) == 6
    assert 0.9 <= found.spread[0] < found.spread[1]

    others = [FleetSearch(replace(asked, seed=seed)) for seed in range(100, 106)]

    def served(rate: float) -> int:
        """Return how many of six other draws sustain this rate."""
        runs = [each.trials.play(shape, rate, fine=True) for each in others]
        return sum(search.trials.is_good_enough(run, strict=False) for run in runs)

    good = served(found.rate)
    assert good >= 3  # on average six in seven
    # A single draw gives a higher rate, which fewer of the other draws sustain.
    rough = present(search.rough_rate(shape, 20.0))
    assert rough.rate > found.rate
    assert served(rough.rate) < good


def test_few_long_prompts_are_judged_with_tolerance() -> None:
    search = FleetSearch(question(LONGS, "ttft:250"))

    def run(kept: int, of: int) -> FlowResult:
        longs = ClassFigures(arrived=of, kept=kept)
        return FlowResult(ClassFigures(arrived=9, met=9), {LONG: longs}, 1.0, 1.0, QuantileSketch())

    # With 44 requests, a share of 90 % varies by 4.5 %.
    assert search.trials.is_good_enough(run(38, 44), strict=False)
    assert not search.trials.is_good_enough(run(38, 44))
    assert not search.trials.is_good_enough(run(37, 44), strict=False)
    assert search.trials.is_good_enough(run(40, 44))


# Refusals


def refusal(asked: PlanQuestion, gpus: int = 2, **given: Any) -> str:
    """Return the message of the refusal; check that it is one line."""
    with pytest.raises(UsageError) as caught:
        plan(asked, gpus, **given)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("workload", "targets", "message", "looser"),
    [
        ("8000x100", "ttft:50 tpot:100", "no number of h100-8b meets it: on an idle .* 0%", "ttft"),
        # On an idle worker nineteen requests in twenty are in time, but no long prompt.
        (LONGS, "ttft:3000 tpot:8.5", f"0% of the longest of {LONGS} are in time", "tpot"),
        ("1500x60", "e2el:100", "on an idle worker", "e2el"),
        # Some requests have too long a prompt, others too long an answer.
        (
            "300x60:0.88,20000x20:0.06,300x600:0.06", "ttft:500 e2el:2000",
            "; ask for looser targets$", None,
        ),
    ],
)  # fmt: skip
def test_impossible_targets_are_refused_with_a_suggestion(
    workload: str, targets: str, message: str, looser: str | None
) -> None:
    asked = question(workload, targets)
    with pytest.raises(UsageError, match=rf"\A--goodput: .*{message}") as caught:
        FleetSearch(asked).check()
    if looser is not None:
        wanted = present(re.search(rf"ask for ({looser}:[\d.]+)", str(caught.value)))[1]
        others = [each for each in targets.split() if not each.startswith(looser)]
        FleetSearch(replace(asked, targets=parse([*others, wanted]))).check()


@pytest.mark.parametrize("borne", [True, False])
def test_idle_worker_check_uses_the_requests_of_the_judging_runs(*, borne: bool) -> None:
    # About one request in ten cannot be in time; the draw decides.
    for seed in range(500):
        search = FleetSearch(question("300x60:0.9,40000x20:0.1", "ttft:250", seed=seed))
        searched, judging = (
            sum(each.prompt_tokens > 300 for each in islice(search.question.shapes(draw), count))
            / count
            for draw, count in enumerate(
                search.trials.count(1.0, fine=fine) for fine in (False, True)
            )
        )
        if (judging < 0.1 < searched) if borne else (searched < 0.1 < judging):
            break
    else:
        pytest.fail("there is no such seed")
    if borne:
        search.check()
    else:
        with pytest.raises(UsageError, match=r"no number of h100-8b meets it: on .* 8[89]% of "):
            search.check()


def test_idle_worker_check_ignores_bursts() -> None:
    asked = question("1500x60", "ttft:500 tpot:40", burstiness=0.01)
    search = FleetSearch(asked)
    search.check()
    # Forty workers serve the burst in time, one does not.
    assert search.trials.serves(FleetShape(general=1), 0.2) is None
    assert search.trials.serves(FleetShape(general=40), 0.2) is not None


def test_rate_beyond_the_gpus_is_refused_with_the_number_needed() -> None:
    text = refusal(question("1500x60", "ttft:500 tpot:40", effort=0.05), gpus=1, rate=300.0)
    assert text.startswith("--request-rate 300: 1 GPU of h100-8b can serve ")
    assert 15 <= int(text.partition("--gpus ")[2].split(",")[0]) <= 40


@pytest.mark.parametrize(
    ("asked", "gpus", "message"),
    [
        (
            question("300x60", "ttft:500", machine=of_profile("h100-70b-tp4")), 3,
            "--gpus 3: a worker of h100-70b-tp4 takes 4; give 4",
        ),
        (
            question("140000x10", "ttft:60000"), 2,
            "100% of the requests are longer than the 131,072 tokens",
        ),
    ],
)  # fmt: skip
def test_unusable_question_is_refused(asked: PlanQuestion, gpus: int, message: str) -> None:
    assert message in refusal(asked, gpus)


def test_exact_without_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_engine, "find_spec", lambda _name: None)
    with pytest.raises(UsageError, match="vLLM is not installed"):
        plan(question("300x60", "ttft:500"), 2, exact=True)


@pytest.fixture(scope="module")
def plain_plan() -> tuple[PlanQuestion, list[ServedRate]]:
    """Return a question and the ranking of the fluid engine: short and long pools are best."""
    families_of_two = (ONE_POOL, SHORT_LONG)
    asked = question(LONGS, "ttft:250", transfer=SLOW_LINK, families=families_of_two, effort=0.1)
    ranking = FleetSearch(asked).best(2)
    assert families(ranking)[0] == SHORT_LONG
    return asked, ranking


def test_exact_run_overrules_the_fluid_ranking(
    plain_plan: tuple[PlanQuestion, list[ServedRate]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slower(search: FleetSearch, shape: FleetShape, rate: float) -> FlowResult:
        """Play one pool exactly, and let all other families fail."""
        if shape.family != ONE_POOL:
            return FlowResult(ClassFigures(arrived=1), {}, 1.0, 1.0, QuantileSketch())
        return truly(search, shape, rate)

    truly = exact_check.play_exactly
    asked, ranking = plain_plan
    monkeypatch.setattr(exact_check, "play_exactly", slower)
    monkeypatch.setattr(exact_check, "EXACT_REQUESTS", 100)
    monkeypatch.setattr(exact_check, "MAX_EXACT_REQUESTS", 100)
    monkeypatch.setattr(FleetSearch, "best", lambda *_: ranking)
    found = plan(asked, 2, exact=True)
    # The best family of the fluid engine served nothing with real schedulers.
    assert families(found.ranking) == [ONE_POOL]
    (one_pool,) = (each for each in ranking if each.shape.family == ONE_POOL)
    assert found.best.rate <= one_pool.rate
    assert found.best.run.all.arrived >= 100
    assert found.best.run.all.share >= asked.share
    assert {proof.share for proof in found.exact.values()} > {0.0}
    # The rate of one more GPU is measured with the same rule.
    assert present(found.more).rate > found.best.rate


def test_repeated_part_does_not_go_back() -> None:
    progress = PlanProgress()
    seen: list[float] = []
    with progress.part(0.2, 0.4):
        for _ in range(2):
            seen += [progress.done for _ in progress.each("ab")]
    assert seen == pytest.approx([0.2, 0.3, 0.4, 0.4])


def test_exact_run_uses_fresh_requests_and_reports_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[str, float]] = []
    progress = PlanProgress(lambda *what: seen.append(what))
    search = FleetSearch(question("300x60", "ttft:500"), progress)
    draws: list[int] = []
    schedule = PlanQuestion.schedule

    def drawn(asked: PlanQuestion, rate: float, count: int, draw: int = 0) -> Schedule:
        draws.append(draw)
        return schedule(asked, rate, count, draw)

    monkeypatch.setattr(PlanQuestion, "schedule", drawn)
    with progress.part(0.7, 0.8):
        run = exact_check.play_exactly(search, FleetShape(general=1), 10.0)
    assert run.all.done == 300
    assert draws == [search.question.draws + 1]  # neither a search draw nor a judging draw
    assert {share for _, share in seen} == {0.7}
    shown = [re.fullmatch(r"exactly: .* at 10/s: (\d+) of 300 requests", what) for what, _ in seen]
    counts = [int(each[1]) for each in shown if each]
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] > 100


def test_exact_run_judges_long_prompts_too(
    plain_plan: tuple[PlanQuestion, list[ServedRate]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def starving(shape: FleetShape) -> FlowResult:
        """Return a run in time, except for long prompts of two pools."""
        longs = ClassFigures(arrived=1, done=1, kept=int(shape.family == ONE_POOL))
        return FlowResult(
            ClassFigures(arrived=9, done=9, met=9), {LONG: longs}, 1.0, 1.0, QuantileSketch()
        )

    asked, ranking = plain_plan
    monkeypatch.setattr(exact_check, "play_exactly", lambda _search, shape, _rate: starving(shape))
    monkeypatch.setattr(FleetSearch, "best", lambda *_: ranking)
    found = plan(asked, 2, exact=True)
    assert families(found.ranking) == [ONE_POOL]
    proofs = {(proof.share, proof.longest, proof.requests) for proof in found.exact.values()}
    assert proofs == {(1.0, 0.0, 9), (1.0, 1.0, 9)}
    monkeypatch.setattr(FleetSearch, "best", lambda *_: ranking[:1])
    assert "of all and of the longest requests in time, at" in refusal(asked, exact=True)


def test_outcomes_are_counted_as_in_the_search() -> None:
    search = FleetSearch(question(LONGS, "ttft:250 tpot:100", effort=0.1))
    alone_s = search.trials.tolerated_ttft_s(40_000)
    assert alone_s > 0.25

    def answered(prompt: int, ttft: float, gap: float = 0.05, *, error: str = "") -> Outcome:
        ticks = [10 + ttft, 10 + ttft + gap]
        return Outcome(10.0, "", prompt, 2, ticks=ticks, completed=2, error=error)

    run = exact_check.count_outcomes(
        search,
        [
            answered(300, 0.2), answered(300, 0.3), answered(300, 0.2, error="gone"),
            answered(40_000, 0.2), answered(40_000, 0.99 * alone_s),
            answered(40_000, 1.01 * alone_s), answered(40_000, 0.99 * alone_s, 0.2),
        ],
        12.0,
    )  # fmt: skip
    assert (run.all.arrived, run.all.done, run.refused) == (7, 6, 1)
    assert (run.classes[LONG].met, run.classes[LONG].kept) == (1, 2)
    assert (run.classes[REST].arrived, run.classes[REST].kept) == (3, 1)
    assert longest_kept(run) == 0.5
    assert not search.trials.is_good_enough(run)


def test_exact_run_that_serves_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = FlowResult(ClassFigures(arrived=1, ended=1), {}, 1.0, 1.0, QuantileSketch())
    monkeypatch.setattr(exact_check, "play_exactly", lambda *_: nothing)
    asked = question("1500x60", "ttft:500 tpot:40", effort=0.1)
    assert "none of the best fleets has 90% of all" in refusal(asked, 1, exact=True)


# Shapes


HINTS = SplitHints(boundaries={500: 0.5, 4000: 0.2}, prefill_share=0.6)


LEAST = {ONE_POOL: 1, SHORT_LONG: 2, PREFILL_DECODE: 2, SHORT_APART: 3}


@pytest.mark.parametrize("family", LEAST)
@pytest.mark.parametrize("workers", [1, 2, 3, 40])
def test_shapes_use_all_workers(family: str, workers: int) -> None:
    tried = list(shapes(family, workers, HINTS))
    assert len(set(tried)) == len(tried)
    assert bool(tried) == (workers >= LEAST[family])
    for shape in tried:
        assert shape.workers == workers
        assert shape.family == family
        assert all(count > 0 for count in shape.pools.values())


@pytest.mark.parametrize("gpus", [1, 4, 5, 6, 9, 24, 161])
@pytest.mark.parametrize(("prefill_gpus", "decode_gpus"), [(1, 4), (4, 1), (2, 8)])
def test_shapes_of_unequal_workers_fit_the_gpus(
    gpus: int, prefill_gpus: int, decode_gpus: int
) -> None:
    hints = replace(HINTS, gpus=decode_gpus, prefill_gpus=prefill_gpus)
    tried = list(shapes(PREFILL_DECODE, gpus, hints))
    assert bool(tried) == (gpus >= prefill_gpus + decode_gpus)
    for shape in tried:
        taken = shape.prefill * prefill_gpus + shape.decode * decode_gpus
        assert gpus - decode_gpus < taken <= gpus
        assert min(shape.prefill, shape.decode) > 0


@pytest.mark.parametrize(
    "shape",
    [
        FleetShape(general=2, policy=BOTH, itl_ms=60),
        FleetShape(short=1, long=2, short_limit=3000, policy=LONG_PROMPT),
        FleetShape(prefill=1, decode=2, policy=CHUNKS, disaggregate_above=512),
        FleetShape(short=2, prefill=1, decode=1, short_limit=3000, policy=BOTH),
        FleetShape(short=1, long=1, short_limit=3600),
        FleetShape(short=1, long=1, short_limit=9999),
        FleetShape(short=1, long=1, short_limit=100_000),
    ],
    ids=str,
)
def test_every_shape_is_a_valid_fleet_file(shape: FleetShape, tmp_path: Path) -> None:
    machine = of_profile("h100-70b-tp4")
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump(shape.to_fleet("m", machine)))
    config = read(path)
    assert not [*note_narrow_workers(config), *note_missing_limits(config)]
    placed = shape.place_workers(machine)
    assert [worker.name for worker in config.workers] == [each.model.name for each in placed]
    for worker, each in zip(config.workers, placed, strict=True):
        assert worker.launch is not None
        assert worker.stated_max_model_len == each.model.max_model_len
        assert worker.launch.policies == each.model.policies
        assert "--tensor-parallel-size=4" in worker.launch.args
    assert config.routing.short_limit == shape.short_limit
    assert (config.transfer is not None) == bool(shape.prefill)


def test_simplest_of_equal_fleets_ranks_first() -> None:
    def served(rate: float, **given: Any) -> ServedRate:
        return ServedRate(FleetShape(**given), rate, NOTHING)

    far = served(10.0, prefill=1, decode=1)
    equal = served(9.8, general=2, policy=BOTH)
    plain = served(9.7, general=2)
    behind = served(5.0, general=2, policy=CHUNKS)
    assert rank_fleets([behind, far, equal, plain]) == [plain, equal, far, behind]


def test_written_fleet_file_has_its_targets_and_command(tmp_path: Path) -> None:
    found = plan(question("1500x60", "ttft:500 tpot:40", effort=0.05), 1)
    assert [each.shape.family for each in found.ranking] == [ONE_POOL]
    assert found.fewer is None
    path = tmp_path / "fleet.yaml"
    write(found, path, model="", command="vllm-sched plan ...", traffic="--x")
    text = path.read_text()
    assert "ttft:500 tpot:40" in text
    assert "# " + " " * 4 + f"vllm-sched simulate {path} --x\n" in text
    assert read(path).model == "meta-llama/Llama-3.1-8B-Instruct"
    write(replace(found), path, model="ours", command="", traffic="")
    assert read(path).model == "ours"


@pytest.mark.parametrize("lines", [2, 40])
def test_short_trace_is_repeated(tmp_path: Path, lines: int) -> None:
    path = tmp_path / "trace.jsonl"
    entry = {"timestamp": 0, "input_length": 1500, "output_length": 30, "hash_ids": [1, 2]}
    path.write_text("\n".join([json.dumps(entry)] * lines))
    targets = "ttft:2000 tpot:60"

    def rate_of(workload: str) -> float:
        search = FleetSearch(question(workload, targets, prefix_hit=0.0))
        search.check()
        served = present(search.rough_rate(FleetShape(general=2), 20.0))
        return served.rate

    assert rate_of(str(path)) == pytest.approx(rate_of("1500x30"), rel=0.13)


@pytest.mark.parametrize("targets", ["itl:80", "tpot:100", "ttft:10000"])
def test_returned_rate_stays_below_the_compute_bound(targets: str) -> None:
    search = FleetSearch(question("1500x100", targets, policies=(CHUNKS,)))
    shape = FleetShape(general=2, policy=CHUNKS, itl_ms=80)
    allowed = 2 * search.trials.traffic.max_worker_rate
    assert allowed == pytest.approx(29.8, rel=0.01)  # by hand: see `capacity`
    served = present(search.judge(shape, 2 * allowed))
    assert 0.8 * allowed < served.rate <= allowed
    # No run is played if the required rate exceeds the bound.
    runs = search.trials.runs
    assert search.judge(shape, allowed, min_rate=1.01 * allowed) is None
    assert search.rough_rate(shape, allowed, min_rate=1.01 * allowed) is None
    assert search.trials.runs == runs


@pytest.mark.parametrize(("effort", "gpus_each"), [(1.0, 1), (1 / 3, 4), (0.4, 8)])
def test_too_many_gpus_are_refused_with_the_largest_number(
    monkeypatch: pytest.MonkeyPatch, effort: float, gpus_each: int
) -> None:
    class BegunError(Exception):
        pass

    def begun(_search: FleetSearch) -> None:
        raise BegunError

    monkeypatch.setattr(FleetSearch, "check", begun)
    asked = question("1500x60", "ttft:30000", effort=effort)
    asked = replace(asked, machine=replace(asked.machine, gpus=gpus_each))
    with pytest.raises(UsageError, match="one simulation") as caught:
        plan(asked, 1_000_000)
    named = present(re.search(r"plan for ([\d,]+) at most", str(caught.value)))
    fits = int(named[1].replace(",", ""))
    assert fits % gpus_each == 0
    with pytest.raises(BegunError):
        plan(asked, fits)
    with pytest.raises(UsageError, match=f"plan for {fits:,} at most"):
        plan(asked, fits + gpus_each)
    # The plan also plays one more worker.
    search = FleetSearch(asked)
    max_rate = (fits // gpus_each + 1) * search.trials.traffic.max_worker_rate
    assert Schedule(source=asked.source, count=search.trials.count(max_rate, fine=True)).count


def test_traffic_is_measured_and_a_run_lasts_longer_than_its_target() -> None:
    traffic = FleetSearch(question("100x10:0.5,900x90:0.5", "ttft:500")).trials.traffic
    assert traffic.totals[-1] == 990
    assert traffic.prompt == pytest.approx(500, rel=0.05)
    assert traffic.above(110) == pytest.approx(0.9, abs=0.01)
    assert traffic.above(990) == 0
    plain, cached = (
        FleetSearch(question("8000x20", "ttft:4000", prefix_hit=hit)).trials.traffic.max_worker_rate
        for hit in (0.0, 0.8)
    )
    assert 3 < cached / plain < 5
    trials = FleetSearch(question("1500x30", "ttft:5000", effort=1.0)).trials
    for rate in (1.0, 100.0, 1e6):
        assert min(trials.count(rate, fine=fine) for fine in (False, True)) >= 20 * rate


def test_growing_queue_fails_though_no_request_is_late() -> None:
    # No target limits the time to first token.
    search = FleetSearch(question("1500x100", "itl:80", policies=(CHUNKS,)))
    shape = FleetShape(general=2, policy=CHUNKS, itl_ms=80)
    allowed = 2 * search.trials.traffic.max_worker_rate
    for fine in (False, True):
        run = search.trials.play(shape, 1.2 * allowed, fine=fine)
        assert run.all.share == 1.0
        assert 0.14 < run.growth < 0.3
        assert not search.trials.is_good_enough(run)
        assert search.trials.is_good_enough(search.trials.play(shape, 0.8 * allowed, fine=fine))


def test_trace_is_sampled_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "drift.jsonl"
    lines = [(300, 50)] * 4500 + [(20_000, 50)] * 4500
    path.write_text(
        "\n".join(
            json.dumps({"timestamp": at, "input_length": prompt, "output_length": output})
            for at, (prompt, output) in enumerate(lines)
        )
    )
    for seed in (0, 1):
        search = FleetSearch(question(str(path), "ttft:3000 tpot:60", seed=seed, effort=0.4))
        assert search.trials.traffic.prompt == pytest.approx(10_150)
        run = search.trials.play(FleetShape(general=2), 1.0, fine=False, whole=True)
        mean = run.all.prompt_tokens / run.all.done
        assert mean == pytest.approx(10_150, rel=0.25)


def test_plan_uses_a_calibration_file(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    time = {"decode_fixed_s": 0.02, "prefill_fixed_s": 0.02, "prefill_s": 1e-4}
    path.write_text(json.dumps({"step_time": time, "kv_tokens": 50_000}))
    machine = of_profile(str(path))
    assert (machine.gpus, machine.kv_tokens, machine.time.prefill_s) == (1, 50_000, 1e-4)
    asked = replace(question("1500x20", "ttft:900 tpot:300", effort=0.05), machine=machine)
    found = plan(asked, 1)
    fleet = tmp_path / "fleet.yaml"
    write(found, fleet, model="", command="", traffic="")
    assert read(fleet).workers[0].profile == str(path)
