"""Fuzzed fleet files: a configuration or a list of errors, never a traceback."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.config import FleetConfig, parse
from proxy.config.redact import shown
from proxy.errors import ConfigError

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.read_text() for path in (ROOT / "deploy/fleets").glob("*.yaml"))
GOOD = "model: tiny\nworkers:\n  - {name: a, url: 'http://h:1'}\n"
ODD = (
    "9" * 5000, "0x" + "f" * 5000, "0b" + "1" * 20_000, "0" + "7" * 6000, "1" + ":59" * 300,
    "1" + ":59" * 300 + ".5", "-1", "0", "1.5", "1e999", ".nan", "-.inf", "true", "~", "''",
    "2020-13-45", "2020-01-01T99:99:99Z", "2020-01-01T00:00:00+99:99", "2020-01-01", "!!int foo",
    "!!int ''", "!!float x", "!!bool x", "!!timestamp x", "!!binary é", "!!binary YQ==",
    "!!python/object/apply:os.system [ls]", "!!set {a, b}", "!!omap [a: 1]", "!!map [a]",
    "!!seq {a: 1}", "!!str [a]", "!unknown x", "*nobody", "&a [*a]", "&a {x: *a}", "[]", "{}",
    "[[[[]]]]", "{? [a] : 1}", "{? {a: 1} : 1}", "{a: 1, a: 2}", "{<<: 1}", '"\\ud800"', '"\\0"',
    "'http://[::1'", "http://h:99999999999", "'\u2028'", "sk-secret", "|\n    text", "nixl", "auto",
)  # fmt: skip
PIECES = st.sampled_from(["\t", "\n", ": ", "- ", "&a ", "*a", "!!", "{", "]", "<<: "])
PIECES |= st.text(max_size=5)
FEWER_EXAMPLES = settings(max_examples=150, deadline=None)
MAX_ERROR_CHARS = 100_000


def read(text: str) -> FleetConfig | ConfigError:
    """Parse a file and render its configuration or its errors."""
    try:
        config = parse(text, "fleet.yaml")
    except ConfigError as error:
        found = error
    else:
        shown(config)
        return config
    assert found.problems
    assert all(problem.message for problem in found.problems)
    assert len(str(found)) < MAX_ERROR_CHARS
    return found


def error_of(text: str) -> str:
    error = read(text)
    assert isinstance(error, ConfigError), error
    return str(error)


@pytest.mark.parametrize("value", ODD, ids=lambda value: repr(value[:30]))
def test_odd_value_in_place_of_any_value(value: str) -> None:
    """In place of each value of a file with all blocks, one at a time."""
    lines = max(EXAMPLES, key=len).splitlines()
    places = [at for at, line in enumerate(lines) if ": " in line and "#" not in line]
    for at in random.Random(value).sample(places, min(len(places), 6)):
        name, _, _ = lines[at].partition(": ")
        read("\n".join([*lines[:at], f"{name}: {value}", *lines[at + 1 :]]))
    read(GOOD + f"router: {{port: {value}}}\n")
    read(GOOD + f"router: {value}\n")
    read(f"model: {value}\nworkers: {value}\n")
    read(GOOD.replace("a,", f"{value},") + f"transfer: {value}\n")


@FEWER_EXAMPLES
@given(st.sampled_from(EXAMPLES), st.data())
def test_file_with_changed_characters(text: str, data: st.DataObject) -> None:
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        removed = data.draw(st.integers(0, 20))
        piece = data.draw(PIECES)
        text = text[:at] + piece + text[at + removed :]
    read(text)


@FEWER_EXAMPLES
@given(st.text(max_size=200))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    read(text)


def bomb(first: str, more: str) -> str:
    """Return nine nested nodes, each with nine aliases of the node before."""
    lines = [f"a0: &a0 {first}"]
    lines += [f"a{n}: &a{n} " + more.replace("*", f"*a{n - 1}") for n in range(1, 9)]
    return "\n".join(lines) + "\n"


BOMBS = {
    "lists": bomb("[x]", "[*,*,*,*,*,*,*,*,*]"),
    "blocks": bomb("{k: v}", "{a: *, b: *, c: *, d: *, e: *, f: *, g: *, h: *, i: *}"),
    "merges": bomb("{k: v}", "{<<: [*,*,*,*,*,*,*,*,*]}"),
    "pairs": bomb("[x]", "!!omap [a: *, b: *, c: *, d: *, e: *, f: *, g: *, h: *, i: *]"),
}


def merges_once() -> bool:
    """Return whether PyYAML merges repeated aliases once, as 6.0.4 does."""
    loader = yaml.SafeLoader("<<: [&a {k: v}, *a]")
    node = loader.get_single_node()
    loader.flatten_mapping(node)
    return len(node.value) == 1


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.parametrize(
    "rest",
    [
        GOOD,
        "model: tiny\nworkers: *a8\n",
        GOOD + "router: *a8\n",
        GOOD + "transfer: {connector: nixl, addresses: *a8}\n",
        GOOD.replace("}", ", launch: {policies: *a8}}"),
        GOOD.replace("}", ", launch: {env: *a8}}"),
    ],
)
def test_alias_bomb_is_refused(name: str, rest: str) -> None:
    # If merges do not add up, the bomb is harmless and has unknown keys only.
    harmless = name == "merges" and merges_once()
    error = error_of(BOMBS[name] + rest)
    assert ("a0: is not a known key" if harmless else "100,000 values") in error


@pytest.mark.parametrize(
    "text",
    [
        GOOD.replace("}", ", launch: {policies: &p {x: *p}}}"),
        "model: tiny\nworkers: &w [*w]\n",
        "&t {model: *t, workers: *t}\n",
    ],
)
def test_recursive_alias_is_refused(text: str) -> None:
    assert "aliases" in error_of(text)


@pytest.mark.parametrize("depth", [20, 55, 65, 100, 300, 1000, 20_000])
@pytest.mark.parametrize("kind", ["[]", "{a: }"])
def test_deep_nesting_is_refused(depth: int, kind: str) -> None:
    begin, end = ("[", "]") if kind == "[]" else ("{a: ", "}")
    nested = begin * depth + end * depth
    error_of(GOOD + f"router: {nested}\n")
    error_of(f"model: {nested}\n")
    read(GOOD.replace("}", f", launch: {{policies: {{x: {{y: {nested}}}}}}}}}"))


def test_large_file_and_many_errors_are_bounded() -> None:
    assert "1,048,576" in error_of(GOOD + "# " + "x" * 1_100_000)
    many = error_of(GOOD + "".join(f"key{n}: 1\n" for n in range(2000)))
    assert many.count("\n") == 100
    assert "more errors" in many


def test_number_error_does_not_show_a_key() -> None:
    text = GOOD.replace("}", ", api_key: !!int sk-secret}")
    assert "sk-secret" not in error_of(text)
