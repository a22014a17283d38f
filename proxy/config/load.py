"""From a file's text to a `FleetConfig`, or to all that is wrong with it at once."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Hashable, Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from proxy.config.checks import CHECKS
from proxy.config.models import (
    FleetConfig,
    PoolConfig,
    RouterConfig,
    RoutingConfig,
    TransferConfig,
    WorkerConfig,
)
from proxy.config.partial import Check, PartialConfig, Place, ProblemPaths
from proxy.config.redact import HIDDEN, is_secret
from proxy.config.tenant_checks import TENANT_CHECKS
from proxy.config.tenants import TenantConfig
from proxy.config.tls import WorkerTlsConfig
from proxy.config.types import Block
from proxy.errors import ConfigError, Problem

LONGEST_VALUE = 60
# Well above what the largest fleet needs, and well below what a parser in Python takes seconds for.
LONGEST_FILE = 1 << 20  # characters
MOST_VALUES = 100_000  # once aliases and merges are written out
DEEPEST = 64
MOST_BITS = 256  # of a whole number
MOST_PROBLEMS = 100
ROUNDS = 4  # of leaving out what is wrong: then a block is wrong that is nothing without it
TAG = "tag:yaml.org,2002:"
MERGE = f"{TAG}merge"
USER_AND_PASSWORD = re.compile(r"//[^/]*@")
QUERY = re.compile(r"(?<=[?#])[^\s'\"]+")
ADDRESSES = {"url", "endpoint"}
# Their messages say all; the others gain from knowing what the field is for.
PLAIN = {"bool_type", "literal_error", "model_type", "string_type", "value_error"}
# What pydantic calls by Python's names is said in the file's.
WORDS = {
    "bool_type": "write true or false",
    "dict_type": "must be a block of keys and values; {} is an empty one",
    "extra_forbidden": "is not known here",
    "float_type": "must be a number",
    "int_from_float": "must be a whole number",
    "int_type": "must be a whole number",
    "missing": "is missing",
    "model_type": "must be a block of keys and values",
    "string_pattern_mismatch": "has characters that can't be here",
    "string_too_short": "is empty; leave it out or give some text",
    "string_type": 'must be text; put it in quotes, as "..."',
    "tuple_type": "must be a list",
}

# What other blocks are judged by: a block in which one of these is wrong might be any.
TELLING = frozenset([
    "name", "role", "model", "url", "host", "port", "args", "policies", "max_model_len",
    "connector", "mode", "path", "addresses", "selector", "dns", "policy", "short_limit",
    "models", "key_file", "keys", "tls",
])  # fmt: skip

Some = TypeVar("Some", bound=Block)


def load(path: Path, *, also: Sequence[Check] = ()) -> FleetConfig:
    """Read a fleet file; `also` are checks beyond our own."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 text (byte {error.start}); save it as such"
    except OSError as error:
        problem = f"can't be read: {error.strerror}; check the path and its permissions"
    else:
        return parse(text, str(path), also=also)
    raise ConfigError(str(path), [Problem("", problem)])


def parse(text: str, source: str, *, also: Sequence[Check] = ()) -> FleetConfig:
    """Read a fleet file's text; `source` names it in errors."""
    try:
        data = _loaded(text)
    except yaml.YAMLError as error:
        raise ConfigError(source, [_bad_yaml(error)]) from None
    if not isinstance(data, dict):
        what = "is empty" if data is None else f"is {_value(data)}, not keys and values"
        raise ConfigError(source, [Problem("", f"{what}; begin with model: and workers:")])
    said: list[ErrorDetails] = []
    config = None
    try:
        config = FleetConfig.model_validate(data)
    except ValidationError as error:
        said = error.errors(include_url=False)
    problems = [*map(_problem, said)]
    doubted = [*map(_doubted, said)]
    told = {problem.path for problem in problems} | {*map(_path, doubted)}
    draft = _draft(data, ProblemPaths(doubted))
    for check in (*CHECKS, *TENANT_CHECKS, *also):
        problems += (problem for problem in check(draft) if problem.path not in told)
    if problems or config is None:
        if (more := len(problems) - MOST_PROBLEMS) > 0:
            problems[MOST_PROBLEMS:] = [Problem("", f"and {more} more like these")]
        raise ConfigError(source, problems)
    return config


def _loaded(text: str) -> object:
    """Read YAML, within bounds; raises `YAMLError`."""
    if len(text) > LONGEST_FILE:
        raise yaml.YAMLError(f"it has {len(text):,} characters; {LONGEST_FILE:,} are the most")
    data = yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader, see below
    if _size(data, {}) > MOST_VALUES:
        raise yaml.YAMLError(
            f"it comes to more than {MOST_VALUES:,} values once its aliases are written out"
        )
    return data


def _size(data: object, known: dict[int, float]) -> float:
    """Count the values of a tree in which a branch may occur many times; infinite in a circle."""
    if not isinstance(data, (dict, list, tuple)):
        return 1
    if (size := known.get(id(data))) is None:
        known[id(data)] = inf
        inner = data.values() if isinstance(data, dict) else data
        size = known[id(data)] = 1 + sum(_size(each, known) for each in inner)
    return size


def _draft(data: Mapping[str, Any], doubts: ProblemPaths) -> PartialConfig:
    """Keep what is right by itself, so that it can be checked beside the rest."""
    discovery = data.get("discovery")
    workers, legible_workers = _legible_ones(WorkerConfig, data.get("workers"))
    pools = discovery.get("pools") if isinstance(discovery, dict) else None
    return PartialConfig(
        workers=workers,
        legible_workers=legible_workers,
        router=_legible(RouterConfig, data.get("router", {})),
        routing=_legible(RoutingConfig, data.get("routing", {})),
        pools=_legible_ones(PoolConfig, pools)[1],
        transfer=_transfer(data.get("transfer")),
        worker_tls=_legible(WorkerTlsConfig, data.get("worker_tls")),
        moves=data.get("transfer") is not None,
        tenants=_legible_ones(TenantConfig, data.get("tenants"))[1],
        has_tenants=bool(data.get("tenants")),
        model=model if isinstance(model := data.get("model"), str) else None,
        doubts=doubts,
    )


def _transfer(raw: object) -> TransferConfig | None:
    return _legible(TransferConfig, {"connector": raw} if isinstance(raw, str) else raw)


def _legible_ones(kind: type[Some], given: object) -> tuple[dict[int, Some], dict[int, Some]]:
    """Read a list; by their place in it those by which others may be judged, and all."""
    sure, all_of_them = {}, {}
    for index, raw in enumerate(given) if isinstance(given, list) else ():
        said: list[ErrorDetails] = []
        block = _legible(kind, raw, f"nameless-{index}", said)
        if block is not None:
            all_of_them[index] = block
            if not any(map(_tells, said)):
                sure[index] = block
    return sure, all_of_them


def _legible(
    kind: type[Some], raw: object, name: str = "", said: list[ErrorDetails] | None = None
) -> Some | None:
    """Read a block without what is wrong in it, which is added to `said`; None if that is all."""
    for _ in range(ROUNDS):
        try:
            return kind.model_validate(raw)
        except ValidationError as error:
            wrong = error.errors(include_url=False)
        if said is not None:
            said += wrong
        for each in wrong:
            raw = _without(raw, each["loc"])
        if name and isinstance(raw, dict):
            raw = {"name": name} | raw
    return None


def _doubted(error: ErrorDetails) -> Place:
    """Name the field that is wrong; an unknown one may be meant for another."""
    location = error["loc"]
    if error["type"] != "extra_forbidden":
        return location
    meant = difflib.get_close_matches(str(location[-1]), _known(_place(location)[0]), n=1)
    return (*location[:-1], *(meant or location[-1:]))


def _tells(error: ErrorDetails) -> bool:
    """Whether it is about such a field, or an unknown one that may be meant for one."""
    parts = [str(part) for part in error["loc"]]
    if error["type"] == "extra_forbidden" and difflib.get_close_matches(parts[-1], TELLING, n=1):
        return True
    return not TELLING.isdisjoint(parts)


def _without(raw: object, location: Sequence[int | str]) -> object:
    """Copy a tree without the innermost field that a location names; lists go whole."""
    if not location or not isinstance(raw, dict) or location[0] not in raw:
        return raw
    key, inner = location[0], raw[location[0]]
    if isinstance(inner, dict) and len(location) > 1 and location[1] in inner:
        return raw | {key: _without(inner, location[1:])}
    return {k: v for k, v in raw.items() if k != key}


class _Loader(yaml.SafeLoader):
    """YAML, in which a key may not come twice: else the first one would go unnoticed.

    Of what PyYAML makes of a text it says nothing but `YAMLError` here, and the place.
    """

    merged = 0  # pairs
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.depth == DEEPEST:
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
                raise _wrong("a list or a block is no key", key_node)
            if key in seen:
                raise _wrong(f"{key!r} comes a second time; keep one", key_node)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
        except yaml.YAMLError:
            raise
        except Exception:  # a ValueError, KeyError, AttributeError, and what else it may be
            raise _wrong(f"this can't be read as {node.tag.removeprefix(TAG)}", node) from None
        if isinstance(value, int) and value.bit_length() > MOST_BITS:
            raise _wrong("a number of so many digits", node)
        if isinstance(value, str) and "\0" in value:
            raise _wrong("a text with a NUL in it", node)
        return value

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        self.merged += len(node.value)
        if self.merged > MOST_VALUES:
            raise _wrong(f"merges of more than {MOST_VALUES:,} values", node)


def _wrong(what: str, node: yaml.Node) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, what, node.start_mark)


def _bad_yaml(error: yaml.YAMLError) -> Problem:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return Problem("", f"is not YAML: {str(error).splitlines()[0]}")
    what = getattr(error, "problem", None) or "can't be read"
    return Problem(f"line {mark.line + 1}, column {mark.column + 1}", f"not YAML: {what}")


def _problem(error: ErrorDetails) -> Problem:
    """Say one of pydantic's complaints in the file's own terms."""
    location = error["loc"]
    kind, value = error["type"], error["input"]
    parent, field = _place(location)
    what = WORDS.get(kind) or error["msg"].removeprefix("Value error, ").replace("Input s", "s")
    if kind == "extra_forbidden":
        return Problem(_path(location), f"{what}; {_nearest(str(location[-1]), parent)}")
    said = what if kind == "missing" else f"{_shown(location, value)}: {what}"
    if parent is not None and field is not None and kind not in PLAIN:
        info = parent.model_fields[field]
        said += f" ({info.description})"
        if isinstance(info.default, (str, int, float)):
            said += f"; default {info.default}"
    return Problem(_path(location), said)


def _path(location: Sequence[int | str]) -> str:
    """Write a location as `workers[1].url`."""
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in location).lstrip(".")


def _place(location: Sequence[int | str]) -> tuple[type[BaseModel] | None, str | None]:
    """Return the innermost block that a location leads into, and which of its fields it names."""
    block: type[BaseModel] | None = FleetConfig
    for depth, part in enumerate(location):
        if isinstance(part, int):
            continue
        if block is None or part not in block.model_fields:
            return block, None
        inner = next(_blocks(block.model_fields[part].annotation), None)
        if inner is None or depth == len(location) - 1:
            return block, part
        block = inner
    return block, None


def _blocks(annotation: object) -> Iterator[type[BaseModel]]:
    """Find the block in `Block | None` or `tuple[Block, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _blocks(argument)


def _known(block: type[BaseModel] | None) -> list[str]:
    return [f.alias or name for name, f in block.model_fields.items()] if block else []


def _nearest(name: str, block: type[BaseModel] | None) -> str:
    known = _known(block)
    if close := difflib.get_close_matches(name, known, n=1):
        return f"did you mean {close[0]}?"
    return f"leave it out; valid: {', '.join(known)}"


def _shown(location: Sequence[int | str], value: object) -> str:
    if any(is_secret(str(part)) for part in location):
        return HIDDEN
    text = _written(value)
    if "//" in text or not ADDRESSES.isdisjoint(location[-1:]):
        text = QUERY.sub(HIDDEN, USER_AND_PASSWORD.sub(f"//{HIDDEN}@", text))
    return _cut(text)


def _value(value: object) -> str:
    return _cut(_written(value))


def _written(value: object) -> str:
    """Write a value as the file may have it."""
    return repr(value) if isinstance(value, str) else yaml_text(value)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def yaml_text(value: object) -> str:
    """Write a value on one line of YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"))
    return text.removesuffix("\n").removesuffix("\n...")
