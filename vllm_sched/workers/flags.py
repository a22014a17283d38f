"""vLLM's command line, as far as we must understand it: flags in any of its spellings.

vLLM takes underscores for hyphens, `--flag value` and `--flag=value`, the last of several,
`--flag.key value` for a key inside a flag that is an object, and some short names, for which
all of that holds too: `-sc.method=ngram`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

SHORT: Final[Mapping[str, str]] = {
    "-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size", "-dpl": "--data-parallel-size-local",
    "-ep": "--enable-expert-parallel", "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size", "-q": "--quantization",
    "-sc": "--speculative-config", "-cc": "--compilation-config", "-ac": "--attention-config",
}  # fmt: skip
LONGEST_NUMBER = 18  # digits; Python reads no number of thousands
# No value begins so, for vLLM's parser takes it for a flag, known or not: -O3, -n. Numbers do.
NAME: Final = re.compile(r"--|-[A-Za-z][^ =]*(=|$)")


class Flag(NamedTuple):
    """One flag of a command line."""

    name: str  # with hyphens: --max-model-len
    value: str | None  # None where nothing follows
    words: list[str]  # as they stood there

    @property
    def whole(self) -> str:
        """The flag that is an object of which this is a key, as `--name` of `--name.key`, or it."""
        return self.name.partition(".")[0]


def parse(words: Sequence[str]) -> Iterator[Flag]:
    """Go through a command line; what belongs to no flag has the name ''."""
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not NAME.match(word):
            yield Flag("", word, [word])
            continue
        name, equals, value = word.partition("=")
        taken = [word]
        found: str | None = value if equals else None
        if not equals and position < len(words) and not NAME.match(words[position]):
            found = words[position]
            taken.append(found)
            position += 1
        whole, dot, inner = name.partition(".")
        yield Flag((SHORT.get(whole, whole) + dot + inner).replace("_", "-"), found, taken)


def names(words: Sequence[str]) -> set[str]:
    """Name the flags that are given."""
    return {flag.name for flag in parse(words) if flag.name}


def last(words: Sequence[str], name: str) -> str | None:
    """Return the value of a flag, the last where it is given several times."""
    found = None
    for flag in parse(words):
        if flag.name == name:
            found = flag.value
    return found


def number(words: Sequence[str], name: str) -> int | None:
    """Return the value of a flag that is a plain number, else None."""
    value = last(words, name)
    plain = value is not None and value.isdecimal() and len(value) <= LONGEST_NUMBER
    return int(value) if value is not None and plain else None


def key(words: Sequence[str], name: str, inner: str) -> Any:
    """Return a key of a flag that is an object, given as JSON or by itself; None without it."""
    return (fields(words, name) or {}).get(inner)


def fields(words: Sequence[str], name: str) -> dict[str, Any] | None:
    """Return a flag that is an object, with the keys that are given by themselves; None without it.

    What is no JSON object counts as empty: vLLM will say so.
    """
    text = last(words, name)
    keys = [flag for flag in parse(words) if flag.whole == name != flag.name]
    if text is None and not keys:
        return None
    read = _json(text or "{}")
    found: dict[str, Any] = read if isinstance(read, dict) else {}
    for flag in keys:
        *path, last_name = flag.name.removeprefix(f"{name}.").replace("-", "_").split(".")
        inner = found
        for each in path:
            if not isinstance(inner.get(each), dict):
                inner[each] = {}
            inner = inner[each]
        inner[last_name] = _json(flag.value or "", flag.value)
    return found


def _json(text: str, otherwise: Any = None) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return otherwise
