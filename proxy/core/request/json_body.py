"""Parse a JSON body: a large one in steps, between which the event loop serves other requests."""

from __future__ import annotations

import gc
import json
from enum import Enum
from typing import Any

import orjson

from proxy.core.request.json_limits import JsonMask, exceeded_bound, may_exceed

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
SLOW_BYTES = 1 << 18  # above: parsed leniently only for NaN and Infinity


def parsed(body: bytes) -> Any:
    text = body.removeprefix(BYTE_ORDER_MARK)
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        if (value := _parse_lenient(text)) is None:
            raise
        return value


def _parse_lenient(body: bytes) -> Any:
    """Parse what vLLM accepts beyond JSON, such as NaN and Infinity.

    Return None for text that workers refuse. Takes two to four times as long as strict JSON.
    """
    if len(body) > SLOW_BYTES and b"NaN" not in body and b"Infinity" not in body:
        return None
    try:
        value = json.loads(body.decode())
        orjson.dumps(value)
    except (ValueError, TypeError, RecursionError):
        return None
    return value


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
        self.exceeded_bound = ""  # the bound that it exceeds
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
            self.exceeded_bound = exceeded_bound(self.mask)
            self._step = DONE if self.exceeded_bound else PARSE
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
