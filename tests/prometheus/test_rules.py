"""Recording rules, alerts and the runbook, checked with promtool."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import yaml

from grafana.build import BOARDS
from grafana.declared import all_of_them
from proxy.admin.api import admin_app
from proxy.config.reference import key, places
from proxy.health import worker_metrics
from tests.prometheus.tools import ALERTS, PROMETHEUS, RECORDED, ROOT, groups, promtool, rules

TESTS = PROMETHEUS / "tests" / "alerts.yml"
FILES = ("rules.yml", "alerts.yml")
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text()
Json = dict[str, Any]

document: Json = yaml.load(TESTS.read_text(), yaml.CSafeLoader)
cases: list[Json] = document["tests"]
each_alert = pytest.mark.parametrize("name", ALERTS)


def outcomes(alert: str) -> list[bool]:
    """Return whether each case of an alert expects it to fire."""
    tests = [
        test for case in cases for test in case["alert_rule_test"] if test["alertname"] == alert
    ]
    return [bool(test["exp_alerts"]) for test in tests]


def recorded_in(exprs: Iterable[str]) -> set[str]:
    return {name for expr in exprs for name in RECORDED if name in expr}


def rules_of(case: Json) -> frozenset[str]:
    """Return the rules that a case needs, with their dependencies."""
    remaining = {test["alertname"] for test in case["alert_rule_test"]}
    remaining |= recorded_in(test["expr"] for test in case.get("promql_expr_test", ()))
    found: set[str] = set()
    while remaining:
        found |= remaining
        remaining = (
            recorded_in(RECORDED.get(name) or ALERTS[name]["expr"] for name in remaining) - found
        )
    return frozenset(found)


def groups_with(names: frozenset[str]) -> Json:
    every = [group for file in FILES for group in groups(file)]
    kept = [
        group | {"rules": [r for r in group["rules"] if r.get("record", r.get("alert")) in names]}
        for group in every
    ]
    return {"groups": [group for group in kept if group["rules"]]}


def run_cases(cases_to_run: Iterable[Json], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run cases with only the rules that they need.

    promtool evaluates all given rules for every minute of a case, which is slow with all rules.
    """
    by_rules: dict[frozenset[str], list[Json]] = {}
    for case in cases_to_run:
        by_rules.setdefault(rules_of(case), []).append(case)
    files = []
    for number, (names, tests) in enumerate(by_rules.items()):
        rules_file, file = folder / f"rules-{number}.yml", folder / f"cases-{number}.yml"
        rules_file.write_text(yaml.dump(groups_with(names), Dumper=yaml.CSafeDumper))
        cases_file = document | {"rule_files": [str(rules_file)], "tests": tests}
        file.write_text(yaml.dump(cases_file, Dumper=yaml.CSafeDumper))
        files.append(str(file))
    return promtool("test", "rules", *files)


@pytest.mark.parametrize("name", FILES)
def test_promtool_accepts_the_rules(name: str) -> None:
    done = promtool("check", "rules", "--lint-fatal", str(PROMETHEUS / name))
    assert done.returncode == 0, done.stdout + done.stderr


def test_cases_refer_to_the_shipped_rules() -> None:
    named = [(TESTS.parent / name).resolve() for name in document["rule_files"]]
    assert named == [PROMETHEUS / name for name in FILES]


def test_values_of_series_are_quoted() -> None:
    # Unquoted, YAML reads `0x60` as 96.
    values_of_series = [item["values"] for case in cases for item in case["input_series"]]
    assert [values for values in values_of_series if not isinstance(values, str)] == []


def test_alerts_fire_as_their_cases_expect(tmp_path: Path) -> None:
    done = run_cases(cases, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_wrong_case_fails(tmp_path: Path) -> None:
    case = next(case for case in cases if case["alert_rule_test"][0]["exp_alerts"])
    for early, fails in ((False, False), (True, True)):
        tests = [test | {"eval_time": "0m"} if early else test for test in case["alert_rule_test"]]
        assert bool(run_cases([case | {"alert_rule_test": tests}], tmp_path).returncode) is fails


def test_silent_cases_stay_silent_with_kubernetes_labels(tmp_path: Path) -> None:
    silent = [
        case for case in cases if not any(test["exp_alerts"] for test in case["alert_rule_test"])
    ]
    more = '{namespace="n",pod="p",container="c",'
    relabelled = [
        case
        | {
            "input_series": [
                item | {"series": item["series"].replace("{", more)}
                for item in case["input_series"]
            ]
        }
        for case in silent
    ]
    done = run_cases(relabelled, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@each_alert
def test_alert_has_a_firing_and_a_silent_case(name: str) -> None:
    assert set(outcomes(name)) == {True, False}


def test_every_case_is_of_an_existing_alert() -> None:
    assert {test["alertname"] for case in cases for test in case["alert_rule_test"]} == set(ALERTS)


@each_alert
def test_alert_has_severity_summary_and_runbook_link(name: str) -> None:
    alert = ALERTS[name]
    assert alert["labels"]["severity"] in ("page", "ticket")
    assert alert["for"]
    assert 20 < len(alert["annotations"]["summary"]) < 160
    # The external labels of Prometheus have the base URL.
    link = f"{{{{ $externalLabels.runbooks }}}}docs/runbook.md#{name.lower()}"
    assert alert["annotations"]["runbook_url"] == link


@each_alert
def test_runbook_entry_has_meaning_and_action(name: str) -> None:
    (entry,) = re.findall(rf"^## {name}\n(.*?)(?=^## |\Z)", RUNBOOK, re.DOTALL | re.MULTILINE)
    assert f"**Means** ({ALERTS[name]['labels']['severity']})" in entry
    assert "**Look at" in entry
    assert re.search(r"\*\*Do\*\*:|do\*\*: ", entry)


def test_runbook_entries_match_the_alerts() -> None:
    assert re.findall(r"^## (\w+)", RUNBOOK, re.MULTILINE) == list(ALERTS)


def test_boards_and_panels_in_the_runbook_exist() -> None:
    runbook = " ".join(RUNBOOK.split())
    boards = {board.title.removeprefix("vllm-sched: "): board for board in BOARDS}
    titles = {item.title for board in BOARDS for item in (*board.rows, *board.panels())}
    titles |= {item.label.removesuffix(" (s)") for board in BOARDS for item in board.variables}
    assert {*re.findall(r'"([A-Z][^"]+?),?"', runbook)} <= titles
    named = re.findall(r'\*([^*]+)\*, "([^"]+?),?"', runbook)
    assert len(named) > 5
    for board, title in named:
        assert title in {panel.title for panel in boards[board].panels()}


def test_metrics_settings_and_paths_in_the_runbook_exist() -> None:
    suffix = re.compile(r"_(total|bucket|sum|count)$")
    declared = {suffix.sub("", name) for name in all_of_them()}
    declared.add(worker_metrics.RUNNING.decode().rstrip("{"))
    families = re.findall(r"`((?:proxy_|vllm_sched_|vllm:|process_)[a-z_]+)", RUNBOOK)
    named = {suffix.sub("", name) for name in families}
    assert named - declared == set()
    keys = {
        f"{path}.{key(*field)}".lstrip(".")
        for path, block in places()
        for field in block.model_fields.items()
    }
    tops = {name.partition(".")[0] for name in keys}
    named = {n for n in re.findall(r"`([a-z]+(?:\.[a-z_]+)+)", RUNBOOK) if n.split(".")[0] in tops}
    assert len(named) > 10
    assert named - keys == set()
    paths = set(re.findall(r"`(?:[A-Z]+ )?(/admin/[\w/]+)`", RUNBOOK))
    assert len(paths) > 3
    described = admin_app(MagicMock(), "127.0.0.1").openapi()["paths"]
    served = {path.replace("{name}", "NAME") for path in described}
    assert paths - served == set()


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_series_names_its_level_and_operation(name: str) -> None:
    form = r"[a-z]+:proxy_[a-z_]+:((ratio|bool|p99)(_rate)?|increase)(\d+[mh])?"
    assert re.fullmatch(form, name)


def test_recorded_names_are_unique() -> None:
    assert len(rules("rules.yml")) == len(RECORDED)


@pytest.mark.parametrize("name", [name for name in RECORDED if re.search(r"\d+[mh]$", name)])
def test_window_in_the_name_is_the_window_of_the_rule(name: str) -> None:
    (window,) = re.findall(r"\d+[mh]$", name)
    windows = set(re.findall(r"\[(\w+)\]", RECORDED[name]))
    assert windows <= {window}
