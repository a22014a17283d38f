"""Recording rules, alerts and the runbook, judged by promtool."""

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

document: Json = yaml.safe_load(TESTS.read_text())
cases: list[Json] = document["tests"]
each_alert = pytest.mark.parametrize("name", ALERTS)


def outcomes(alert: str) -> list[bool]:
    """Say of each case of an alert whether it is to fire."""
    told = [one for case in cases for one in case["alert_rule_test"] if one["alertname"] == alert]
    return [bool(one["exp_alerts"]) for one in told]


def recorded(exprs: Iterable[str]) -> set[str]:
    """Name the recorded series that some expressions read."""
    return {name for expr in exprs for name in RECORDED if name in expr}


def needed(case: Json) -> frozenset[str]:
    """Name the rules that a case asks for, and those that they rest on."""
    left = {one["alertname"] for one in case["alert_rule_test"]}
    left |= recorded(one["expr"] for one in case.get("promql_expr_test", ()))
    found: set[str] = set()
    while left:
        found |= left
        left = recorded(RECORDED.get(name) or ALERTS[name]["expr"] for name in left) - found
    return frozenset(found)


def only(names: frozenset[str]) -> Json:
    """Return the rules of these names, in their groups."""
    every = [group for file in FILES for group in groups(file)]
    kept = [
        group | {"rules": [r for r in group["rules"] if r.get("record", r.get("alert")) in names]}
        for group in every
    ]
    return {"groups": [group for group in kept if group["rules"]]}


def judged(some: Iterable[Json], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run cases, each with no more rules than it needs.

    promtool works out every rule that it is given for every minute of a case. With the files as
    they ship those would be a hundred for the sake of a few, in a hundred cases.
    """
    alike: dict[frozenset[str], list[Json]] = {}
    for case in some:
        alike.setdefault(needed(case), []).append(case)
    files = []
    for number, (names, tests) in enumerate(alike.items()):
        rules_file, file = folder / f"rules-{number}.yml", folder / f"cases-{number}.yml"
        rules_file.write_text(yaml.safe_dump(only(names)))
        told = document | {"rule_files": [str(rules_file)], "tests": tests}
        file.write_text(yaml.safe_dump(told))
        files.append(str(file))
    return promtool("test", "rules", *files)


@pytest.mark.parametrize("name", FILES)
def test_promtool_has_no_complaint(name: str) -> None:
    done = promtool("check", "rules", "--lint-fatal", str(PROMETHEUS / name))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_cases_are_of_the_rules_that_ship() -> None:
    named = [(TESTS.parent / name).resolve() for name in document["rule_files"]]
    assert named == [PROMETHEUS / name for name in FILES]


def test_values_are_texts() -> None:
    # Unquoted, YAML takes `0x60` for 96, and so it is when it is written anew here.
    told = [each["values"] for case in cases for each in case["input_series"]]
    assert [values for values in told if not isinstance(values, str)] == []


def test_alerts_fire_and_keep_silent_as_their_cases_say(tmp_path: Path) -> None:
    done = judged(cases, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_case_can_fail(tmp_path: Path) -> None:
    case = next(case for case in cases if case["alert_rule_test"][0]["exp_alerts"])
    for early, wrong in ((False, False), (True, True)):
        told = [one | {"eval_time": "0m"} if early else one for one in case["alert_rule_test"]]
        assert bool(judged([case | {"alert_rule_test": told}], tmp_path).returncode) is wrong


def test_what_keeps_silent_does_so_with_the_labels_that_kubernetes_adds(tmp_path: Path) -> None:
    silent = [
        case for case in cases if not any(one["exp_alerts"] for one in case["alert_rule_test"])
    ]
    more = '{namespace="n",pod="p",container="c",'
    relabelled = [
        case
        | {
            "input_series": [
                each | {"series": each["series"].replace("{", more)}
                for each in case["input_series"]
            ]
        }
        for case in silent
    ]
    done = judged(relabelled, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@each_alert
def test_it_has_a_case_in_which_it_fires_and_one_in_which_it_is_silent(name: str) -> None:
    assert set(outcomes(name)) == {True, False}


def test_every_case_is_of_an_alert_that_there_is() -> None:
    assert {one["alertname"] for case in cases for one in case["alert_rule_test"]} == set(ALERTS)


@each_alert
def test_it_says_how_bad_it_is_what_is_and_where_to_read_on(name: str) -> None:
    alert = ALERTS[name]
    assert alert["labels"]["severity"] in ("page", "ticket")
    assert alert["for"]
    assert 20 < len(alert["annotations"]["summary"]) < 160
    # Where that is, Prometheus's external labels say: see the cases.
    link = f"{{{{ $externalLabels.runbooks }}}}docs/runbook.md#{name.lower()}"
    assert alert["annotations"]["runbook_url"] == link


@each_alert
def test_its_entry_in_the_runbook_says_what_it_means_and_what_to_do(name: str) -> None:
    (entry,) = re.findall(rf"^## {name}\n(.*?)(?=^## |\Z)", RUNBOOK, re.DOTALL | re.MULTILINE)
    assert f"**Means** ({ALERTS[name]['labels']['severity']})" in entry
    assert "**Look at" in entry
    assert re.search(r"\*\*Do\*\*:|do\*\*: ", entry)


def test_the_runbook_has_no_entry_for_what_is_no_alert() -> None:
    assert re.findall(r"^## (\w+)", RUNBOOK, re.MULTILINE) == list(ALERTS)


def test_what_the_runbook_has_one_look_at_is_there() -> None:
    runbook = " ".join(RUNBOOK.split())
    boards = {board.title.removeprefix("vllm-sched: "): board for board in BOARDS}
    titles = {each.title for board in BOARDS for each in (*board.rows, *board.panels())}
    titles |= {each.label.removesuffix(" (s)") for board in BOARDS for each in board.variables}
    assert {*re.findall(r'"([A-Z][^"]+?),?"', runbook)} <= titles
    named = re.findall(r'\*([^*]+)\*, "([^"]+?),?"', runbook)
    assert len(named) > 5
    for board, title in named:
        assert title in {panel.title for panel in boards[board].panels()}


def test_metrics_settings_and_requests_that_the_runbook_names_are_there() -> None:
    suffix = re.compile(r"_(total|bucket|sum|count)$")
    told = {suffix.sub("", name) for name in all_of_them()}
    told.add(worker_metrics.RUNNING.decode().rstrip("{"))
    families = re.findall(r"`((?:proxy_|vllm_sched_|vllm:|process_)[a-z_]+)", RUNBOOK)
    named = {suffix.sub("", name) for name in families}
    assert named - told == set()
    keys = {
        f"{path}.{key(*field)}".lstrip(".")
        for path, block in places()
        for field in block.model_fields.items()
    }
    tops = {each.partition(".")[0] for each in keys}
    named = {n for n in re.findall(r"`([a-z]+(?:\.[a-z_]+)+)", RUNBOOK) if n.split(".")[0] in tops}
    assert len(named) > 10
    assert named - keys == set()
    paths = set(re.findall(r"`(?:[A-Z]+ )?(/admin/[\w/]+)`", RUNBOOK))
    assert len(paths) > 3
    described = admin_app(MagicMock()).openapi()["paths"]
    served = {path.replace("{name}", "NAME") for path in described}
    assert paths - served == set()


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_series_says_its_level_and_its_operation(name: str) -> None:
    form = r"[a-z]+:proxy_[a-z_]+:((ratio|bool|p99)(_rate)?|increase)(\d+[mh])?"
    assert re.fullmatch(form, name)


def test_no_two_rules_record_the_same() -> None:
    assert len(rules("rules.yml")) == len(RECORDED)


@pytest.mark.parametrize("name", [name for name in RECORDED if re.search(r"\d+[mh]$", name)])
def test_the_window_in_its_name_is_the_one_it_looks_at(name: str) -> None:
    (window,) = re.findall(r"\d+[mh]$", name)
    looked = set(re.findall(r"\[(\w+)\]", RECORDED[name]))
    assert looked <= {window}
