"""Writes `docs/configuration.md`, the reference of the fleet file, from the models themselves.

python -m proxy.config.reference            # write it
python -m proxy.config.reference --check    # exit status 1 if it is not what the models say
"""

from __future__ import annotations

import re
import sys
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from proxy.config.load import yaml_text
from proxy.config.models import FleetConfig
from proxy.config.types import Block

FILE = Path(__file__).parents[2] / "docs" / "configuration.md"
HEAD = """\
# The fleet file

Written by `python -m proxy.config.reference` from what the router itself reads; a test keeps it so.
Any key that is not here is refused. `vllm-sched check FLEET.yaml` says all that is wrong with a
file, and with `--print-config` what it comes to with all defaults.
"""
BOUNDS = (
    ("minimum", "at least {}"),
    ("exclusiveMinimum", "more than {}"),
    ("maximum", "at most {}"),
    ("exclusiveMaximum", "less than {}"),
)
WORDS = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
}
Place = tuple[str, type[BaseModel]]


def reference() -> str:
    """Write the page."""
    return HEAD + "".join(section(path, block) for path, block in places())


@cache
def places() -> list[Place]:
    """List all blocks by where they stand, the file itself first; each once, nearest the top."""
    found: list[Place] = []
    waiting: list[Place] = [("", FleetConfig)]
    while waiting:
        path, block = waiting.pop(0)
        found.append((path, block))
        inner = [
            (f"{path}.{key(name, field)}{'[]' if is_list(field) else ''}".lstrip("."), each)
            for name, field in block.model_fields.items()
            for each in blocks_in(field.annotation)
        ]
        waiting = inner + waiting  # what belongs together stands together
    nearest = {block: path for path, block in sorted(found, key=depth, reverse=True)}
    return [(path, block) for path, block in found if nearest[block] == path]


def depth(place: Place) -> int:
    """Tell how far from the top a block stands."""
    return place[0].count(".")


def section(path: str, block: type[BaseModel]) -> str:
    """Write a block's part."""
    schema = block.model_json_schema()
    title = f"`{path}`" if path else "The file itself"
    rows = "".join(
        f"| `{key(name, field)}` | {cell(kind(name, field, schema))} | {cell(default(field))} "
        f"| {cell(field.description or told(field))} |\n"
        for name, field in block.model_fields.items()
    )
    said = (block.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")
    return (
        f"\n## {title}\n\n{re.sub(' +', ' ', said)}\n\n"
        f"| key | what it may be | default | |\n|---|---|---|---|\n{rows}"
    )


def key(name: str, field: FieldInfo) -> str:
    """Return a field's name as it stands in the file."""
    return field.alias or name


def cell(text: str) -> str:
    """Keep a text from ending a table's cell."""
    return text.replace("|", "\\|").replace("\n", " ")


def told(field: FieldInfo) -> str:
    """Say what a block is, where its field has no words of its own."""
    block = next(blocks_in(field.annotation), None)
    said = ((block.__doc__ if block else "") or "").strip().splitlines()
    return said[0][0].lower() + said[0][1:].rstrip(".") if said else ""


def default(field: FieldInfo) -> str:
    """Say what holds where the file says nothing."""
    if field.is_required():
        return "must be given"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    if isinstance(value, Block):
        return "its own"
    return f"`{yaml_text(list(value) if isinstance(value, tuple) else plain(value))}`"


def plain(value: object) -> object:
    """Return what YAML can write."""
    return str(value) if isinstance(value, Path) else value


def kind(name: str, field: FieldInfo, schema: dict[str, Any]) -> str:
    """Say what a field may be."""
    block = next(blocks_in(field.annotation), None)
    if block is not None:
        path = next(path for path, other in places() if other is block)
        return f"{'list of ' if is_list(field) else ''}[{path}](#{anchor(path)})"
    return shape(schema["properties"][key(name, field)], schema.get("$defs", {}))


def shape(schema: dict[str, Any], defs: dict[str, Any]) -> str:
    """Say in words what a part of a JSON schema takes."""
    if "$ref" in schema:
        return shape(defs[schema["$ref"].rpartition("/")[2]], defs)
    if "anyOf" in schema:
        each = [shape(s, defs) for s in schema["anyOf"] if s.get("type") != "null"]
        return " or ".join(dict.fromkeys(each))
    if "enum" in schema:
        return ", ".join(f"`{yaml_text(value)}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema.get("type") == "array":
        return f"list of {shape(schema.get('items', {}), defs)}"
    if schema.get("type") == "object":
        return "keys and values"
    words = WORDS.get(schema.get("type", ""), "anything")
    limits = [text.format(schema[name]) for name, text in BOUNDS if name in schema]
    return ", ".join([words, *limits])


def is_list(field: FieldInfo) -> bool:
    """Whether it is a list of blocks."""
    return "tuple" in str(field.annotation)


def blocks_in(annotation: object) -> Iterator[type[BaseModel]]:
    """Find the block in `Block | None` or `tuple[Block, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from blocks_in(argument)


def anchor(path: str) -> str:
    """Return where a heading's link leads to."""
    return re.sub(r"[^\w-]", "", path.lower())


def main(told: list[str]) -> int:
    """Write it, or see whether it is written."""
    text = reference()
    if "--check" not in told:
        FILE.write_text(text, encoding="utf-8")
        return 0
    if FILE.read_text(encoding="utf-8") == text:
        return 0
    print(f"{FILE}: run `python -m proxy.config.reference`", file=sys.stderr)  # noqa: T201
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
