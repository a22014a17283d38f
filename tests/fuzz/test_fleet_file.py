"""Fleet files of all kinds: a configuration or all that is wrong with it, never a traceback."""

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
FEW = settings(max_examples=150, deadline=None)
LONGEST_ERROR = 100_000


def read(text: str) -> FleetConfig | ConfigError:
    """Read a file, and look at what comes of it as its user would."""
    try:
        config = parse(text, "fleet.yaml")
    except ConfigError as error:
        found = error
    else:
        shown(config)
        return config
    assert found.problems
    assert all(problem.message for problem in found.problems)
    assert len(str(found)) < LONGEST_ERROR
    return found


def fails(text: str) -> str:
    """Return what is said of a bad file."""
    error = read(text)
    assert isinstance(error, ConfigError), error
    return str(error)


@pytest.mark.parametrize("value", ODD, ids=lambda value: repr(value[:30]))
def test_an_odd_value_anywhere(value: str) -> None:
    """In the place of each value of a file with all blocks, one at a time."""
    lines = max(EXAMPLES, key=len).splitlines()
    places = [at for at, line in enumerate(lines) if ": " in line and "#" not in line]
    for at in random.Random(value).sample(places, min(len(places), 12)):
        name, _, _ = lines[at].partition(": ")
        read("\n".join([*lines[:at], f"{name}: {value}", *lines[at + 1 :]]))
    read(GOOD + f"router: {{port: {value}}}\n")
    read(GOOD + f"router: {value}\n")
    read(f"model: {value}\nworkers: {value}\n")
    read(GOOD.replace("a,", f"{value},") + f"transfer: {value}\n")


@FEW
@given(st.sampled_from(EXAMPLES), st.data())
def test_a_file_with_some_characters_changed(text: str, data: st.DataObject) -> None:
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        gone = data.draw(st.integers(0, 20))
        piece = data.draw(PIECES)
        text = text[:at] + piece + text[at + gone :]
    read(text)


@FEW
@given(st.text(max_size=200))
def test_any_text(text: str) -> None:
    read(text)


def bomb(first: str, more: str) -> str:
    """Make each of nine nodes of nine of the one before."""
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
    """Whether PyYAML, as 6.0.4 does, merges what comes again and again but once."""
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
def test_a_bomb_does_not_go_off(name: str, rest: str) -> None:
    # Where merges do not add up there is no bomb, and nothing but names that nobody knows.
    harmless = name == "merges" and merges_once()
    told = fails(BOMBS[name] + rest)
    assert ("a0: is not a known key" if harmless else "100,000 values") in told


@pytest.mark.parametrize(
    "text",
    [
        GOOD.replace("}", ", launch: {policies: &p {x: *p}}}"),
        "model: tiny\nworkers: &w [*w]\n",
        "&t {model: *t, workers: *t}\n",
    ],
)
def test_what_is_inside_itself_is_refused(text: str) -> None:
    assert "aliases" in fails(text)


@pytest.mark.parametrize("depth", [20, 55, 65, 100, 300, 1000, 20_000])
@pytest.mark.parametrize("kind", ["[]", "{a: }"])
def test_depth(depth: int, kind: str) -> None:
    begin, end = ("[", "]") if kind == "[]" else ("{a: ", "}")
    nested = begin * depth + end * depth
    fails(GOOD + f"router: {nested}\n")
    fails(f"model: {nested}\n")
    read(GOOD.replace("}", f", launch: {{policies: {{x: {{y: {nested}}}}}}}}}"))


def test_much() -> None:
    assert "1,048,576" in fails(GOOD + "# " + "x" * 1_100_000)
    many = fails(GOOD + "".join(f"key{n}: 1\n" for n in range(2000)))
    assert many.count("\n") == 100
    assert "more errors" in many


def test_no_error_about_a_number_tells_a_key() -> None:
    text = GOOD.replace("}", ", api_key: !!int sk-secret}")
    assert "sk-secret" not in fails(text)
