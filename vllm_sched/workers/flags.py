"""Parse vLLM's command line.

vLLM takes underscores for hyphens, `--flag value`, `--flag=value`, and `--flag.key value` for
object flags. The last of several flags wins. Short names work too: `-sc.method=ngram`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from vllm_sched.policies.types import EngineFacts

CONFIG_FLAG: Final = "--config"
SHORT_NAMES: Final[Mapping[str, str]] = {
    "-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size", "-dpl": "--data-parallel-size-local",
    "-ep": "--enable-expert-parallel", "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size", "-q": "--quantization",
    "-sc": "--speculative-config", "-cc": "--compilation-config", "-ac": "--attention-config",
}  # fmt: skip
MAX_NUMBER_DIGITS = 18  # Python refuses to parse thousands of digits
# A limit of an engine that is not stated: no setting is refused for exceeding it.
UNKNOWN_LIMIT: Final = sys.maxsize
# vLLM's parser takes these words for flags (-O3, -n), known or not, never for values.
FLAG_PATTERN: Final = re.compile(r"--|-[A-Za-z][^ =]*(=|$)")


class Flag(NamedTuple):
    name: str  # with hyphens: --max-model-len
    value: str | None  # None if no value follows
    words: list[str]  # the words as written

    @property
    def whole(self) -> str:
        """The name without an object key: `--name` for `--name.key`."""
        return self.name.partition(".")[0]


def parse(words: Sequence[str]) -> Iterator[Flag]:
    """Yield the flags of a command line; a word that belongs to no flag has the name ''."""
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not FLAG_PATTERN.match(word):
            yield Flag("", word, [word])
            continue
        name, equals, value = word.partition("=")
        words_of_flag = [word]
        flag_value: str | None = value if equals else None
        if not equals and position < len(words) and not FLAG_PATTERN.match(words[position]):
            flag_value = words[position]
            words_of_flag.append(flag_value)
            position += 1
        whole, dot, inner = name.partition(".")
        full_name = (SHORT_NAMES.get(whole, whole) + dot + inner).replace("_", "-")
        yield Flag(full_name, flag_value, words_of_flag)


def flag_names(words: Sequence[str]) -> set[str]:
    return {flag.name for flag in parse(words) if flag.name}


def last_value(words: Sequence[str], name: str) -> str | None:
    value = None
    for flag in parse(words):
        if flag.name == name:
            value = flag.value
    return value


def int_value(words: Sequence[str], name: str) -> int | None:
    """Return the value of a flag as an integer; None if it is not a plain number."""
    value = last_value(words, name)
    plain = value is not None and value.isdecimal() and len(value) <= MAX_NUMBER_DIGITS
    return int(value) if value is not None and plain else None


def stated_facts(words: Sequence[str], max_model_len: int | None) -> EngineFacts:
    """Return the limits of the engine that its flags state."""
    return EngineFacts(
        max_model_len=max_model_len or UNKNOWN_LIMIT,
        max_num_batched_tokens=int_value(words, "--max-num-batched-tokens") or UNKNOWN_LIMIT,
        max_num_seqs=int_value(words, "--max-num-seqs") or UNKNOWN_LIMIT,
    )


def json_key(words: Sequence[str], name: str, inner: str) -> Any:
    """Return a key of an object flag, given in JSON or as `--name.key`; None if absent."""
    return (json_object(words, name) or {}).get(inner)


def json_object(words: Sequence[str], name: str) -> dict[str, Any] | None:
    """Return an object flag merged with its `--name.key` flags; None if neither is given.

    A value that is not a JSON object counts as empty, because vLLM reports it.
    """
    text = last_value(words, name)
    keys = [flag for flag in parse(words) if flag.whole == name != flag.name]
    if text is None and not keys:
        return None
    read = _json(text or "{}")
    merged: dict[str, Any] = read if isinstance(read, dict) else {}
    for flag in keys:
        *path, last_name = flag.name.removeprefix(f"{name}.").replace("-", "_").split(".")
        inner = merged
        for key in path:
            if not isinstance(inner.get(key), dict):
                inner[key] = {}
            inner = inner[key]
        inner[last_name] = _json(flag.value or "", flag.value)
    return merged


def _json(text: str, otherwise: Any = None) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return otherwise


def with_config_file(args: Sequence[str]) -> list[str]:
    """Return `args` with the flags of the `--config` file in front, and without `--config`.

    They are unchanged if the file can't be read here.
    """
    name = last_value(args, CONFIG_FLAG)
    if not name:
        return list(args)
    try:
        read = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
        if not isinstance(read, dict):
            return list(args)
        words = [word for key, value in read.items() for word in _words(f"--{key}", value)]
    except (OSError, ValueError, TypeError, yaml.YAMLError):  # TypeError: dates are not JSON
        return list(args)
    rest = [word for flag in parse(args) if flag.name != CONFIG_FLAG for word in flag.words]
    return words + rest


def absolute_config(args: Sequence[str]) -> list[str]:
    """Return `args` with `--config` as its own word and with an absolute path.

    vLLM accepts `--config=FILE` but silently ignores the file.
    """
    words: list[str] = []
    for flag in parse(args):
        if flag.name == CONFIG_FLAG and flag.value:
            is_file = Path(flag.value).is_file()
            words += [CONFIG_FLAG, str(Path(flag.value).absolute()) if is_file else flag.value]
        else:
            words += flag.words
    return words


def _words(name: str, value: object) -> Iterator[str]:
    if isinstance(value, bool):
        if value:  # `vllm serve` ignores false values
            yield name
        return
    values = value if isinstance(value, list) else [value]
    if not values:
        return
    yield name
    for item in values:
        yield json.dumps(item) if isinstance(item, dict) else str(item)
