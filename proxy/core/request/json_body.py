"""Parse a JSON body: a large one in steps, between which the event loop serves other requests."""

from __future__ import annotations

import gc
import json
from enum import Enum
from typing import Any

import orjson

from proxy.core.request.json_limits import JsonMask, excess, may_exceed


def parsed(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        if (found := _lenient(body)) is None:
            raise
        return found


def _lenient(body: bytes) -> Any:
    """Parse what vLLM accepts beyond JSON: a byte order mark, NaN, Infinity.

    Return None for text that workers refuse. Takes two to four times as long as strict JSON.
    """
    try:
        found = json.loads(body.decode("utf-8-sig"))
        orjson.dumps(found)
    except (ValueError, TypeError, RecursionError):
        return None
    return found


class BodyStep(Enum):
    COUNT = "count"
    MASK = "mask"
    COUNT_EXACTLY = "count_exactly"
    PARSE = "parse"
    DONE = "done"


COUNT, MASK, COUNT_EXACTLY = BodyStep.COUNT, BodyStep.MASK, BodyStep.COUNT_EXACTLY
PARSE, DONE = BodyStep.PARSE, BodyStep.DONE


class LargeBody:
    def __init__(self, text: bytes) -> None:
        self.mask = JsonMask(text)
        self.excess = ""  # the bound that it exceeds
        self._step = COUNT
        self._fields: Any = None
        self._error: orjson.JSONDecodeError | None = None

    def advance(self) -> bool:
        """Do a step; return whether another one follows."""
        step, text = self._step, self.mask.text
        if step is COUNT:
            self._step = MASK if may_exceed(text) else PARSE
        elif step is MASK:
            self.mask.get()
            self._step = COUNT_EXACTLY
        elif step is COUNT_EXACTLY:
            self.excess = excess(self.mask)
            self._step = DONE if self.excess else PARSE
        elif step is PARSE:
            self._parse(text)
            self._step = DONE
        return self._step is not DONE

    def fields(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._fields

    def _parse(self, text: bytes) -> None:
        collects = gc.isenabled()  # it would walk the values repeatedly
        gc.disable()
        try:
            self._fields = parsed(text)
        except orjson.JSONDecodeError as error:
            self._error = error
        finally:
            if collects:
                gc.enable()
