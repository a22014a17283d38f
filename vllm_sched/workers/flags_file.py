"""The flags in a `--config FILE.yaml`; vLLM's command line has precedence over the file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import yaml

from vllm_sched.workers.flags import last, parse

CONFIG_FLAG: Final = "--config"


def expanded(args: Sequence[str]) -> list[str]:
    """Return `args` with the file's flags in front; unchanged if the file can't be read here."""
    name = last(args, CONFIG_FLAG)
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


def readable(args: Sequence[str]) -> list[str]:
    """Return `args` with `--config` as its own word and with an absolute path.

    vLLM accepts `--config=FILE` but silently ignores the file.
    """
    words: list[str] = []
    for flag in parse(args):
        if flag.name == CONFIG_FLAG and flag.value:
            there = Path(flag.value).is_file()
            words += [CONFIG_FLAG, str(Path(flag.value).absolute()) if there else flag.value]
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
    for each in values:
        yield json.dumps(each) if isinstance(each, dict) else str(each)
