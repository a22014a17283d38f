"""The flags that vLLM reads from a file: `--config FILE.yaml`, which its command line beats."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import yaml

from vllm_sched.workers.flags import last, parse

CONFIG: Final = "--config"


def expanded(args: Sequence[str]) -> list[str]:
    """Put a file's flags before the others; as it was where the file can't be read from here."""
    name = last(args, CONFIG)
    if not name:
        return list(args)
    try:
        read = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
        if not isinstance(read, dict):
            return list(args)
        words = [word for key, value in read.items() for word in _words(f"--{key}", value)]
    except (OSError, ValueError, TypeError, yaml.YAMLError):  # dates are no JSON
        return list(args)
    rest = [word for flag in parse(args) if flag.name != CONFIG for word in flag.words]
    return words + rest


def readable(args: Sequence[str]) -> list[str]:
    """Name the file so that vLLM reads it: in a word of its own, and from wherever it starts.

    `--config=FILE` it takes, and passes over without a word.
    """
    words: list[str] = []
    for flag in parse(args):
        if flag.name == CONFIG and flag.value:
            there = Path(flag.value).is_file()
            words += [CONFIG, str(Path(flag.value).absolute()) if there else flag.value]
        else:
            words += flag.words
    return words


def _words(name: str, value: object) -> Iterator[str]:
    if isinstance(value, bool):
        if value:  # `vllm serve` passes over what is false
            yield name
        return
    values = value if isinstance(value, list) else [value]
    if not values:
        return
    yield name
    for each in values:
        yield json.dumps(each) if isinstance(each, dict) else str(each)
