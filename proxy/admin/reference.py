"""The admin API's reference as an HTML page without script, made from `/openapi.json`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.responses import HTMLResponse, Response

from proxy.admin.status_routes import page_headers

PATH = "/docs"
SCHEMAS = "#/components/schemas/"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h2 { margin-top: 2.5rem } section { border-top: 1px solid #8886; padding: .3rem 0 }
code { font: 13px ui-monospace, monospace } td { padding: .1rem .8rem .1rem 0; vertical-align: top }
"""
Json = dict[str, Any]


def reference_routes(app: FastAPI) -> APIRouter:
    api = APIRouter()

    @api.get(PATH, include_in_schema=False)
    async def reference() -> Response:
        text = reference_page(app.openapi())
        return HTMLResponse(text, headers=page_headers(text))

    return api


def reference_page(described: Json) -> str:
    title = escape(described["info"]["title"])
    body = [
        f"<h1>{title}</h1><p>{escape(described['info'].get('description', ''))}</p>",
        '<p>For programs: <a href="/openapi.json">/openapi.json</a></p>',
        "<h2>Operations</h2>",
    ]
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            body += _operation(f"{method.upper()} {path}", operation)
    body.append("<h2>Schemas</h2>")
    for name, schema in described.get("components", {}).get("schemas", {}).items():
        body += _schema(name, schema)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head><body>{''.join(body)}</body></html>"
    )


def _operation(name: str, operation: Json) -> Iterator[str]:
    yield f"<section><h3><code>{escape(name)}</code> {escape(operation.get('summary', ''))}</h3>"
    yield f"<p>{escape(operation.get('description', ''))}</p><table>"
    for parameter in operation.get("parameters", ()):
        yield _row(parameter["name"], f"in {parameter['in']}", parameter.get("schema", {}))
    for content in operation.get("requestBody", {}).get("content", {}).values():
        yield _row("body", "", content.get("schema", {}))
    for status, response in operation["responses"].items():
        for content in response.get("content", {}).values():
            yield _row(f"response {status}", "", content.get("schema", {}))
    yield "</table></section>"


def _schema(name: str, schema: Json) -> Iterator[str]:
    yield f'<section id="{escape(name)}"><h3><code>{escape(name)}</code></h3>'
    yield f"<p>{escape(schema.get('description', ''))}</p><table>"
    required = schema.get("required", ())
    for key, value in schema.get("properties", {}).items():
        yield _row(key, "required" if key in required else "", value)
    if "enum" in schema:
        yield f"<tr><td>{escape(', '.join(map(str, schema['enum'])))}</td></tr>"
    yield "</table></section>"


def _row(name: str, note: str, schema: Json) -> str:
    default = f"default {json.dumps(schema['default'])}" if "default" in schema else ""
    text = ". ".join(filter(None, (note, default, schema.get("description", ""))))
    return (
        f"<tr><td><code>{escape(name)}</code></td><td>{_kind(schema)}</td>"
        f"<td>{escape(text)}</td></tr>"
    )


def _kind(schema: Json) -> str:
    if (ref := schema.get("$ref")) is not None:
        name = escape(ref.removeprefix(SCHEMAS))
        return f'<a href="#{name}">{name}</a>'
    if "items" in schema:
        return f"list of {_kind(schema['items'])}"
    for union in ("anyOf", "oneOf", "allOf"):
        if union in schema:
            return " or ".join(map(_kind, schema[union]))
    if "enum" in schema:
        return escape(", ".join(map(json.dumps, schema["enum"])))
    if "const" in schema:
        return escape(json.dumps(schema["const"]))
    return escape(str(schema.get("type", "anything")))
