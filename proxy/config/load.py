"""Reads a fleet file into a `FleetConfig`, or reports all of its errors at once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from proxy.config.checks import CHECKS
from proxy.config.fleet_file import (
    FleetConfig,
    RouterConfig,
    RoutingConfig,
    TransferConfig,
    as_block,
)
from proxy.config.partial import Check, PartialConfig, Place, ProblemPaths
from proxy.config.redact import HIDDEN, is_secret, without_password
from proxy.config.tenant_checks import TENANT_CHECKS
from proxy.config.tenants import TenantConfig
from proxy.config.tls import WorkerTlsConfig
from proxy.config.types import Block, blocks_in, is_label
from proxy.config.workers import DiscoveryConfig, PoolConfig, WorkerConfig
from proxy.errors import ConfigError, Problem
from proxy.text_files import UnreadableFileError, read_text

ENTRY = re.compile(r"(tenants|workers|discovery\.pools)\[(\d+)\]")
MAX_VALUE_CHARS = 60  # of a value in a message
# Well above the needs of the largest fleet, and below sizes that take PyYAML seconds to parse.
MAX_FILE_CHARS = 1 << 20
MAX_VALUES = 100_000  # after aliases and merges are expanded
MAX_DEPTH = 64
MAX_INT_BITS = 256
MAX_PROBLEMS = 100
MAX_ROUNDS = 4  # removing an invalid field can make the block around it invalid
TAG = "tag:yaml.org,2002:"
MERGE = f"{TAG}merge"
URL_FIELDS = {"url", "endpoint", "database"}
# Error types with a complete message; messages of other types get the field's description.
COMPLETE = {"bool_type", "literal_error", "model_type", "path_type", "string_type", "value_error"}
# Messages in terms of YAML, for pydantic's messages in terms of Python.
MESSAGES = {
    "bool_type": "write true or false",
    "dict_type": "must be a block of keys and values; write {} for an empty block",
    "extra_forbidden": "is not a known key",
    "float_type": "must be a number",
    "int_from_float": "must be a whole number",
    "int_type": "must be a whole number",
    "missing": "is missing",
    "model_type": "must be a block of keys and values",
    "path_type": 'must be a path; put it in quotes, as "..."',
    "string_pattern_mismatch": "has characters that are not allowed",
    "string_too_short": "is empty; leave it out or give a text",
    "string_type": 'must be text; put it in quotes, as "..."',
    "tuple_type": "must be a list",
}

BlockType = TypeVar("BlockType", bound=Block)


def load(path: Path, *, also: Sequence[Check] = ()) -> FleetConfig:
    """Return the configuration in a fleet file; `also` are additional checks."""
    try:
        text = read_text(path)
    except UnreadableFileError as error:
        raise ConfigError(str(path), [Problem("", str(error))]) from None
    return parse(text, str(path), also=also)


def parse(text: str, source: str, *, also: Sequence[Check] = ()) -> FleetConfig:
    """Return the configuration in a text; errors name `source`."""
    try:
        data = _load_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(source, [_bad_yaml(error)]) from None
    if not isinstance(data, dict):
        what = "is empty" if data is None else f"is {_value(data)}, not keys and values"
        raise ConfigError(source, [Problem("", f"{what}; begin with model: and workers:")])
    errors: list[ErrorDetails] = []
    config = None
    try:
        config = FleetConfig.model_validate(data)
    except ValidationError as error:
        errors = error.errors(include_url=False)
    problems = [*map(_problem, errors)]
    places = [*map(_place_of, errors)]
    reported = {problem.path for problem in problems} | {*map(_path, places)}
    draft = PartialConfig(config or _valid_parts(data), ProblemPaths(places))
    for check in (*CHECKS, *TENANT_CHECKS, *also):
        problems += (problem for problem in check(draft) if problem.path not in reported)
    if problems or config is None:
        if (more := len(problems) - MAX_PROBLEMS) > 0:
            problems[MAX_PROBLEMS:] = [Problem("", f"and {more} more errors")]
        raise ConfigError(source, [_named(problem, data) for problem in problems])
    return config


def _named(problem: Problem, data: Mapping[str, Any]) -> Problem:
    """Add the name of the entry of a list; in a long list its number is no help."""
    if (match := ENTRY.match(problem.path)) is None:
        return problem
    place: Any = data
    try:
        for key in (*match[1].split("."), int(match[2]), "name"):
            place = place[key]
    except (LookupError, TypeError):
        return problem
    return replace(problem, name=place) if is_label(place) else problem


def _load_yaml(text: str) -> object:
    if len(text) > MAX_FILE_CHARS:
        raise yaml.YAMLError(
            f"it has {len(text):,} characters; at most {MAX_FILE_CHARS:,} are allowed"
        )
    data = yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader, see below
    if _size(data, {}) > MAX_VALUES:
        raise yaml.YAMLError(
            f"it has more than {MAX_VALUES:,} values after its aliases are expanded"
        )
    return data


def _size(data: object, sizes: dict[int, float]) -> float:
    if not isinstance(data, (dict, list, tuple)):
        return 1
    if (size := sizes.get(id(data))) is None:
        sizes[id(data)] = inf
        inner = data.values() if isinstance(data, dict) else data
        size = sizes[id(data)] = 1 + sum(_size(value, sizes) for value in inner)
    return size


def _valid_parts(data: Mapping[str, Any]) -> FleetConfig:
    """Return the file without its invalid fields; a block that cannot be read has its defaults."""
    discovery, transfer, model = map(data.get, ("discovery", "transfer", "model"))
    pools = _parse_blocks(PoolConfig, discovery.get("pools") if isinstance(discovery, dict) else ())
    return FleetConfig.model_construct(
        model=model if isinstance(model, str) else "",
        discovery=DiscoveryConfig.model_construct(pools=pools) if pools else None,
        workers=_parse_blocks(WorkerConfig, data.get("workers")),
        tenants=_parse_blocks(TenantConfig, data.get("tenants")),
        worker_tls=_parse_block(WorkerTlsConfig, data.get("worker_tls")),
        router=_parse_block(RouterConfig, data.get("router")) or RouterConfig(),
        routing=_parse_block(RoutingConfig, data.get("routing")) or RoutingConfig(),
        transfer=_parse_block(TransferConfig, as_block(transfer)),
    )


def _parse_blocks(kind: type[BlockType], blocks: object) -> tuple[BlockType, ...]:
    """Return the blocks of a list, at their places."""
    parsed = []
    for index, raw in enumerate(blocks) if isinstance(blocks, list) else ():
        named = {"name": f"nameless-{index}"}
        parsed.append(_parse_block(kind, raw, named) or kind.model_validate(named))
    return tuple(parsed)


def _parse_block(
    kind: type[BlockType], raw: object, required: Mapping[str, str] | None = None
) -> BlockType | None:
    """Return a block without its invalid fields, or None; `required` are added if they lack."""
    for _ in range(MAX_ROUNDS):
        try:
            return kind.model_validate(raw)
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                raw = _remove_field(raw, detail["loc"])
        if required and isinstance(raw, dict):
            raw = {**required, **raw}
    return None


def _place_of(error: ErrorDetails) -> Place:
    location = error["loc"]
    if error["type"] != "extra_forbidden":
        return location
    similar = difflib.get_close_matches(str(location[-1]), _known(_place(location)[0]), n=1)
    return (*location[:-1], *(similar or location[-1:]))


def _remove_field(raw: object, location: Sequence[int | str]) -> object:
    """Return a copy of a tree without the innermost field of a location; lists go as a whole."""
    if not location or not isinstance(raw, dict) or location[0] not in raw:
        return raw
    key, inner = location[0], raw[location[0]]
    if isinstance(inner, dict) and len(location) > 1 and location[1] in inner:
        return raw | {key: _remove_field(inner, location[1:])}
    return {k: v for k, v in raw.items() if k != key}


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses duplicate keys, which PyYAML would silently drop.

    Every error is a `YAMLError` with its line and column.
    """

    merged = 0  # key-value pairs
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.depth == MAX_DEPTH:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="nested too deeply", problem_mark=mark)
        self.depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if key_node.tag == MERGE:
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise _yaml_error("a list or a block can't be a key", key_node)
            if key in seen:
                raise _yaml_error(f"{key!r} is given twice; remove one", key_node)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
        except yaml.YAMLError:
            raise
        except Exception:  # constructors raise ValueError, KeyError, AttributeError and others
            raise _yaml_error(f"can't be read as {node.tag.removeprefix(TAG)}", node) from None
        if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            raise _yaml_error(f"a number of more than {MAX_INT_BITS} bits", node)
        if isinstance(value, str) and "\0" in value:
            raise _yaml_error("a text with a NUL character", node)
        return value

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        self.merged += len(node.value)
        if self.merged > MAX_VALUES:
            raise _yaml_error(f"merges of more than {MAX_VALUES:,} values", node)


def _yaml_error(what: str, node: yaml.Node) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, what, node.start_mark)


def _bad_yaml(error: yaml.YAMLError) -> Problem:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return Problem("", f"is not YAML: {str(error).splitlines()[0]}")
    what = getattr(error, "problem", None) or "can't be read"
    return Problem(f"line {mark.line + 1}, column {mark.column + 1}", f"not YAML: {what}")


def _problem(error: ErrorDetails) -> Problem:
    location = error["loc"]
    kind, value = error["type"], error["input"]
    parent, field = _place(location)
    what = MESSAGES.get(kind) or error["msg"].removeprefix("Value error, ").replace("Input s", "s")
    if kind == "extra_forbidden":
        return Problem(_path(location), f"{what}; {_suggestion(str(location[-1]), parent)}")
    message = what if kind == "missing" else f"{_shown(location, value)}: {what}"
    if parent is not None and field is not None and kind not in COMPLETE:
        info = parent.model_fields[field]
        message += f" ({info.description})"
        if isinstance(info.default, (str, int, float)):
            message += f"; default {info.default}"
    return Problem(_path(location), message)


def _path(location: Sequence[int | str]) -> str:
    parts = (part for part in location if part != "[key]")
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in parts).lstrip(".")


def _place(location: Sequence[int | str]) -> tuple[type[BaseModel] | None, str | None]:
    block: type[BaseModel] | None = FleetConfig
    for depth, part in enumerate(location):
        if isinstance(part, int):
            continue
        if block is None or part not in block.model_fields:
            return block, None
        inner = next(blocks_in(block.model_fields[part].annotation), None)
        if inner is None or depth == len(location) - 1:
            return block, part
        block = inner
    return block, None


def _known(block: type[BaseModel] | None) -> list[str]:
    return [f.alias or name for name, f in block.model_fields.items()] if block else []


def _suggestion(name: str, block: type[BaseModel] | None) -> str:
    names = _known(block)
    if close := difflib.get_close_matches(name, names, n=1):
        return f"did you mean {close[0]}?"
    return f"leave it out; valid: {', '.join(names)}"


def _shown(location: Sequence[int | str], value: object) -> str:
    if any(is_secret(str(part)) for part in location):
        return HIDDEN
    text = _written(value)
    if "//" in text or not URL_FIELDS.isdisjoint(location[-1:]):
        text = without_password(text)
    return _shorten(text)


def _value(value: object) -> str:
    return _shorten(_written(value))


def _written(value: object) -> str:
    return repr(value) if isinstance(value, str) else yaml_text(value)


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}..."


def yaml_text(value: object) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"))
    return text.removesuffix("\n").removesuffix("\n...")
