"""The X-Request-Id of a request, from vLLM's internal id.

vLLM writes an API's prefix before the X-Request-Id, and after it the index of a prompt and eight
random hexadecimal digits. The X-Request-Id itself may end like that, so there are several readings.
"""

from __future__ import annotations

import re
from typing import Final

# As in vLLM's entrypoints.
APIS: Final = (
    "chatcmpl", "cmpl", "generate-tokens", "transcribe", "translate", "decision",
    "generative-scoring", "pooling", "classify", "score", "embd",
)  # fmt: skip
# With the number of the sequence, if the request has several.
ENGINE_ID: Final = re.compile(rf"(?:\d+_)?(?:({'|'.join(APIS)})-)?(.+)", re.DOTALL)
SUFFIX: Final = re.compile(r"-[0-9a-f]{8}$")
INDEX: Final = re.compile(r"[-_]\d+$")
INDEXED: Final = "cmpl"  # always has an index


def request_ids(engine_id: str) -> tuple[str, ...]:
    """Return the X-Request-Ids that an engine's id may stand for, the most likely one first."""
    if (parts := ENGINE_ID.fullmatch(engine_id)) is None:
        return ()
    api, rest = parts.groups()
    ids: list[str] = []
    for whole in (SUFFIX.sub("", rest), rest):  # vLLM can be told to write no random digits
        part = INDEX.sub("", whole)
        ids += (part, whole) if api == INDEXED else (whole, part)
    return tuple(dict.fromkeys(name for name in ids if name))
