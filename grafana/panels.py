"""Dashboard elements (queries, panels, rows, variables) and their JSON for Grafana."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

Json = dict[str, Any]
Kind = Literal["timeseries", "stat", "table"]

WIDTH = 24  # of a dashboard, in Grafana's units
SCHEMA = 39
DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
TAG = "vllm-sched"
VLLMS_TAG = "vllm"  # tag of vLLM's dashboards

# PromQL keywords, which look like metric names.
WORDS = frozenset(("and", "or", "unless", "bool", "offset", "inf", "nan"))
STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"')
LABELS = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
MATCHERS = re.compile(r"\{[^}]*\}|\[[^\]]*\]")
NAME = re.compile(r"(?<![\w:$.])[a-zA-Z_:][\w:]*(?!\w|\s*\()")
HISTOGRAM = re.compile(r"_(bucket|sum|count)$")


@dataclass(frozen=True)
class Query:
    """One expression and the legend of its series."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One panel; `text` explains it, and the list of metrics is added automatically."""

    title: str
    text: str
    unit: str
    queries: tuple[Query, ...]
    kind: Kind = "timeseries"
    width: int = 8
    height: int = 8
    stacked: bool = False
    low: float = 0  # lower end of the axis
    most: float | None = None
    bad_above: float | None = None
    bad_below: float | None = None


@dataclass(frozen=True)
class Row:
    """Panels under a heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Variable:
    """A selection: the values of a metric's label, or fixed values."""

    name: str
    label: str
    metric: str = ""
    of: str = ""  # the label
    values: tuple[str, ...] = ()
    default: str = ""


@dataclass(frozen=True)
class Board:
    uid: str
    title: str
    text: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]

    def panels(self) -> Iterator[Panel]:
        for row in self.rows:
            yield from row.panels

    def expressions(self) -> Iterator[tuple[str, str]]:
        for panel in self.panels():
            for query in panel.queries:
                yield panel.title, query.expr


def series(expr: str) -> set[str]:
    """Return the names of the series that an expression reads."""
    bare = LABELS.sub(" ", MATCHERS.sub(" ", STRINGS.sub('""', expr)))
    found = (match.group() for match in NAME.finditer(bare))
    return {name for name in found if name not in WORDS}


def metrics(panel: Panel) -> list[str]:
    """Return the metrics that a panel shows; histograms by their family."""
    names = {name for query in panel.queries for name in series(query.expr)}
    return sorted({HISTOGRAM.sub("", name) for name in names})


def to_json(board: Board) -> Json:
    return {
        "uid": board.uid,
        "title": board.title,
        "description": board.text,
        "tags": [TAG, VLLMS_TAG],
        "schemaVersion": SCHEMA,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [_link("This project's dashboards", TAG), _link("vLLM's dashboards", VLLMS_TAG)],
        "templating": {"list": [_source(), *map(_variable, board.variables)]},
        "panels": list(_placed(board.rows)),
    }


def _link(title: str, tag: str) -> Json:
    return {
        "type": "dashboards",
        "title": title,
        "tags": [tag],
        "asDropdown": True,
        "includeVars": False,  # vLLM's variables have other names and values
        "keepTime": True,
        "targetBlank": False,
        "icon": "external link",
        "tooltip": "",
        "url": "",
    }


def _source() -> Json:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
        "hide": 0,
        "includeAll": False,
        "multi": False,
        "options": [],
        "refresh": 1,
        "regex": "",
        "skipUrlSync": False,
    }


def _variable(variable: Variable) -> Json:
    common: Json = {
        "name": variable.name,
        "label": variable.label,
        "hide": 0,
        "skipUrlSync": False,
    }
    if variable.values:
        options = [
            {"text": value, "value": value, "selected": value == variable.default}
            for value in variable.values
        ]
        return common | {
            "type": "custom",
            "query": ",".join(variable.values),
            "current": {"text": variable.default, "value": variable.default, "selected": True},
            "options": options,
            "includeAll": False,
            "multi": False,
        }
    query = f"label_values({variable.metric}, {variable.of})"
    return common | {
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": variable.name},
        "current": {"text": ["All"], "value": ["$__all"], "selected": True},
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "options": [],
        "refresh": 2,
        "regex": "",
        "sort": 1,
    }


def _placed(rows: tuple[Row, ...]) -> Iterator[Json]:
    """Lay out panels from left to right, row by row, and number them in that order."""
    number, y = 0, 0
    for row in rows:
        number += 1
        place = {"x": 0, "y": y, "w": WIDTH, "h": 1}
        yield {"id": number, "type": "row", "title": row.title, "collapsed": False,
               "gridPos": place, "panels": []}  # fmt: skip
        x, y, high = 0, y + 1, 0
        for panel in row.panels:
            if x + panel.width > WIDTH:
                x, y, high = 0, y + high, 0
            number += 1
            place = {"x": x, "y": y, "w": panel.width, "h": panel.height}
            yield _panel(panel) | {"id": number, "gridPos": place}
            x, high = x + panel.width, max(high, panel.height)
        y += high


def _panel(panel: Panel) -> Json:
    listed = ", ".join(f"`{name}`" for name in metrics(panel))
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": f"{panel.text}\n\nMetrics: {listed}",
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _options(panel.kind),
        "targets": [_target(panel, *each) for each in enumerate(panel.queries)],
    }


def _target(panel: Panel, index: int, query: Query) -> Json:
    now = panel.kind != "timeseries"
    return {
        "refId": chr(ord("A") + index),
        "datasource": DATASOURCE,
        "editorMode": "code",
        "expr": query.expr,
        "legendFormat": query.legend or "__auto",
        "format": "table" if panel.kind == "table" else "time_series",
        "instant": now,
        "range": not now,
    }


def _defaults(panel: Panel) -> Json:
    steps: list[Json] = [{"color": "green", "value": None}]
    if panel.bad_above is not None:
        steps.append({"color": "red", "value": panel.bad_above})
    if panel.bad_below is not None:
        steps = [{"color": "red", "value": None}, {"color": "green", "value": panel.bad_below}]
    marked = panel.bad_above is not None or panel.bad_below is not None
    defaults: Json = {
        "unit": panel.unit,
        "min": panel.low,
        "thresholds": {"mode": "absolute", "steps": steps},
        "color": {"mode": "palette-classic" if panel.kind == "timeseries" else "thresholds"},
    }
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 30 if panel.stacked else 0,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "dashed" if marked else "off"},
        }
    return defaults


def _options(kind: Kind) -> Json:
    if kind == "timeseries":
        return {
            "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull"]},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    if kind == "stat":
        return {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "value",
            "graphMode": "none",
            "textMode": "auto",
        }
    return {"showHeader": True, "cellHeight": "sm"}
