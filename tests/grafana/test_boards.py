"""Boards equal the builder's output, use declared metrics, and parse."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from grafana import build, declared, reference, rules
from grafana.boards.fleet import FAILED
from grafana.build import BOARDS
from grafana.panels import Board, Panel, Query, Row, metrics, series
from proxy.metrics.histogram import DURATION_BOUNDS, GAP_BOUNDS, LEFT_BOUNDS, TTFT_BOUNDS
from tests.prometheus.tools import ALERTS, RECORDED, ROOT, promtool
from vllm_sched.cost.step_time import COEFFICIENTS

Json = dict[str, Any]
each_board = pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
PROVISIONING = ("grafana", "provisioning")
# Values of Grafana's variables and of the boards' own.
VARIABLES = {"$__rate_interval": "5m", "$ttft_slo": "3.0", "$itl_slo": "0.2"}


def read_board(board: Board) -> Json:
    return dict(json.loads((ROOT / build.FOLDER / f"{board.uid}.json").read_text()))


def panels(board: Board) -> list[Json]:
    """Return the panels in a board's file, without headings."""
    return [panel for panel in read_board(board)["panels"] if panel["type"] != "row"]


def test_files_equal_the_builders_output() -> None:
    assert build.differing() == [], "run `python -m grafana.build`"
    assert build.main(["--check"]) == 0


def test_changed_missing_and_unknown_files_are_reported(tmp_path: Path) -> None:
    for name, text in build.files().items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert build.differing(tmp_path) == []
    boards = tmp_path / build.FOLDER
    (boards / "vllm-sched-fleet.json").write_text("{}")
    (boards / "vllm-sched-engine.json").unlink()
    (boards / "mine.json").write_text("{}")
    (tmp_path / reference.FILE).write_text("otherwise")
    (tmp_path / rules.FILE).unlink()
    wrong = [line.split()[0] for line in build.differing(tmp_path)]
    names = ("vllm-sched-fleet.json", "vllm-sched-engine.json", "mine.json")
    assert sorted(wrong) == sorted(
        [*(f"{build.FOLDER}/{name}" for name in names), reference.FILE, rules.FILE]
    )


@pytest.mark.parametrize(
    "name", ["proxy_requests", "vllm_sched_steps", "vllm:gpu_cache_usage_perc", "a:b:c"]
)
def test_undeclared_metric_is_reported(name: str) -> None:
    panel = Panel("P", "", "s", (Query(f"rate({name}[5m])"),))
    board = Board("u", "B", "", (), (Row("", (panel,)),))
    (line,) = build.undefined([board], declared.all_of_them())
    assert line.startswith(f"B: P: {name} is not declared")


@pytest.mark.parametrize(
    ("expr", "found"),
    [
        ("rate(a_total[5m])", {"a_total"}),
        ('sum by (x, le) (rate(a_bucket{le="b",c=~"d|e"}[$__rate_interval]))', {"a_bucket"}),
        ("a / on (x) group_left (y) (b > 0)", {"a", "b"}),
        ("(a or vector(0)) and on () (b:c:d > bool 1e3)", {"a", "b:c:d"}),
        ("time() - a offset 5m", {"a"}),
        ("histogram_quantile(0.99, a) unless 2 * b", {"a", "b"}),
    ],
)
def test_names_are_found_in_expressions(expr: str, found: set[str]) -> None:
    assert series(expr) - {"5m", "m"} == found


@each_board
def test_board_has_uid_schema_tags_and_links(board: Board) -> None:
    page = read_board(board)
    assert page["uid"] == board.uid
    assert len(page["uid"]) <= 40
    assert page["schemaVersion"] == 39
    assert set(page["tags"]) == {"vllm-sched", "vllm"}
    assert {"vllm"} in [set(link["tags"]) for link in page["links"]]
    numbers = [panel["id"] for panel in page["panels"]]
    assert numbers == sorted(set(numbers))


@each_board
def test_panels_do_not_overlap_or_leave_the_page(board: Board) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in read_board(board)["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells


@each_board
def test_every_panel_has_unit_targets_and_metrics(board: Board) -> None:
    titles = [panel.title for panel in board.panels()]
    assert len(set(titles)) == len(titles)
    for panel, written in zip(board.panels(), panels(board), strict=True):
        last = written["description"].rpartition("\n\n")[2]
        assert last == "Metrics: " + ", ".join(f"`{name}`" for name in metrics(panel))
        assert metrics(panel)
        assert written["fieldConfig"]["defaults"]["unit"]
        assert written["targets"]
        assert {target["datasource"]["uid"] for target in written["targets"]} == {"${datasource}"}
        references = [target["refId"] for target in written["targets"]]
        assert len(set(references)) == len(references)


@each_board
def test_variables_are_used_and_declared(board: Board) -> None:
    names = {item["name"] for item in read_board(board)["templating"]["list"]}
    assert {"datasource", "job", "instance", "model"} <= names
    text = json.dumps(read_board(board))
    used = set(re.findall(r"\$\{?([a-z_]+)", text)) - {"__rate_interval", "__all"}
    assert used == names


SELECTED = re.compile(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}")
LABELS = {
    name: family.labels
    for family in (*declared.router_families(), *declared.engine_families())
    for name in declared.names(family.name, family.kind)
}


@each_board
def test_model_variable_selects_every_series_with_a_model(board: Board) -> None:
    for title, expr in board.expressions():
        for name, selector in SELECTED.findall(expr):
            if {"model", "model_name"} & {*LABELS.get(name, ())}:
                assert 'model_name=~"$model"' in selector or 'model=~"$model"' in selector, title


@each_board
def test_series_of_one_panel_have_distinct_legends(board: Board) -> None:
    """An instance may have several engines (data parallelism)."""
    for panel in board.panels():
        for query in panel.queries:
            labels = re.findall(r"{{(\w+)}}", query.legend)
            if grouped := re.match(r"\W*(?:sum|max|min|avg) by \(([^)]*)\)", query.expr):
                if panel.kind != "table":
                    assert sorted(labels) == sorted(grouped[1].split(", ")), panel.title
            elif query.expr.removeprefix("time() - ").startswith("vllm_sched_"):
                assert labels == ["instance", "engine"], panel.title


def test_time_held_is_a_share_of_each_engine() -> None:
    """A sum over engines exceeds 100 %."""
    [held] = [expr for board in BOARDS for _, expr in board.expressions() if "held_seconds" in expr]
    assert held.startswith("sum by (instance, engine) ")


def test_no_line_at_zero_means_a_fault() -> None:
    """A legend such as `w0 not read` with the value 0 would say the opposite."""
    for board in BOARDS:
        for title, expr in board.expressions():
            assert not re.search(r"== 0\b", expr), title


def test_board_counts_failures_as_the_alert() -> None:
    assert f"proxy_requests_total{{{FAILED}}}" in RECORDED["model:proxy_failed:ratio_rate5m"]


def test_targets_are_histogram_bounds() -> None:
    values = {v.name: v.values for board in BOARDS for v in board.variables if v.values}
    assert set(map(float, values["ttft_slo"])) <= {*TTFT_BOUNDS} & {*LEFT_BOUNDS}
    assert set(map(float, values["itl_slo"])) <= {*GAP_BOUNDS}
    assert all(value == repr(float(value)) for options in values.values() for value in options)
    # Limits of alert rules.
    assert {3.0, 10.0} <= {*LEFT_BOUNDS}
    assert 60.0 in DURATION_BOUNDS


@each_board
def test_counters_are_rated_and_divisors_are_positive(board: Board) -> None:
    for title, expr in board.expressions():
        for name in series(expr):
            if name.endswith(("_total", "_bucket", "_sum", "_count")):
                assert re.search(rf"(rate|increase)\({re.escape(name)}\{{", expr), (title, name)
        for divisor in re.findall(r" / (?:on \([^)]*\) group_left \([^)]*\) )?(.*)", expr):
            assert re.fullmatch(r"\(.* > 0\)", divisor), (title, divisor)


def test_every_expression_parses(tmp_path: Path) -> None:
    records = []
    for number, (_, expr) in enumerate(e for board in BOARDS for e in board.expressions()):
        for name, value in VARIABLES.items():
            expr = expr.replace(name, value)  # noqa: PLW2901  # one after the other
        records.append({"record": f"panel:expr:n{number}", "expr": expr})
    document = {"groups": [{"name": "panels", "rules": records}]}
    (tmp_path / "panels.yml").write_text(yaml.safe_dump(document))
    done = promtool("check", "rules", str(tmp_path / "panels.yml"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(records)} rules found" in done.stdout


IN_BOARDS = {name for board in BOARDS for _, expr in board.expressions() for name in series(expr)}
RULES = [*RECORDED.values(), *(alert["expr"] for alert in ALERTS.values())]
IN_RULES = {name for expr in RULES for name in series(expr)}


def families(names: Iterable[str]) -> set[str]:
    """Return the names of metrics: one of the three series of a histogram is enough."""
    return {re.sub("_(bucket|sum|count)$", "", name) for name in names}


def test_metrics_of_alerts_and_rules_are_declared() -> None:
    assert declared.all_of_them() >= IN_RULES
    assert declared.recorded() == set(RECORDED)


# Metrics of a router that no graph shows, and why.
WITHOUT_GRAPH = {
    "process_start_time_seconds": "for the runbook: shows restarts",
    "process_virtual_memory_bytes": "resident memory is on a board",
}


def test_router_metrics_are_on_a_board_or_in_a_rule() -> None:
    variables = (series(variable.metric) for board in BOARDS for variable in board.variables)
    used = IN_BOARDS.union(IN_RULES, *variables)
    assert families(declared.routers()) - families(used) == set(WITHOUT_GRAPH), (
        "show it on a board in grafana/boards, or give the reason in WITHOUT_GRAPH"
    )


def test_engine_metrics_are_on_a_board() -> None:
    # Learnt values of policies, for diagnosis.
    learned = {f"vllm_sched_fit_{name}" for name in COEFFICIENTS}
    learned |= {f"vllm_sched_mean_{of}_tokens" for of in ("prompt", "output")}
    learned.add("vllm_sched_long_chunk_tokens")
    assert families(declared.engines()) - families(IN_BOARDS) == learned, (
        "show it on a board in grafana/boards, or add it to `learned`"
    )


def test_provisioning_matches_compose() -> None:
    def read(*path: str) -> Json:
        return dict(yaml.safe_load(ROOT.joinpath(*path).read_text()))

    compose = read("deploy", "compose", "compose.yaml")["services"]
    mounted = {v.split(":")[1]: v.split(":")[0] for v in compose["grafana"]["volumes"]}
    (provider,) = read(*PROVISIONING, "dashboards", "boards.yaml")["providers"]
    assert provider["options"]["path"] in mounted
    assert mounted["/etc/grafana/provisioning"].endswith("grafana/provisioning")
    (source,) = read(*PROVISIONING, "datasources", "prometheus.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in compose
    assert (source["type"], source["isDefault"]) == ("prometheus", True)
    config = read("deploy", "prometheus", "prometheus.yml")
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]
