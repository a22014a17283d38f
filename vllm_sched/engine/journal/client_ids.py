"""The X-Request-Id of a request, from vLLM's internal id.

vLLM writes an API's prefix before it, and after it the index of a prompt and eight hexadecimal
digits. The X-Request-Id may end like that itself, so there are several readings.
"""

from __future__ import annotations

import re
from typing import Final

# As in vLLM's entrypoints.
APIS: Final = (
    "chatcmpl|cmpl|generate-tokens|transcribe|translate|decision|generative-scoring|pooling|"
    "classify|score|embd"
)
# A request with several sequences has their number in front.
ENGINE_ID: Final = re.compile(rf"(?:\d+_)?(?:(?:{APIS})-)?(.+)", re.DOTALL)
SUFFIX: Final = re.compile(r"-[0-9a-f]{8}$")
INDEX: Final = re.compile(r"[-_]\d+$")


def client_ids(engine_id: str) -> set[str]:
    match = ENGINE_ID.fullmatch(engine_id)
    rest = match[1] if match is not None else engine_id
    whole = {rest, SUFFIX.sub("", rest)}
    return whole | {INDEX.sub("", whole_id) for whole_id in whole}
