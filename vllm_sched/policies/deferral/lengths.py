"""Mean prompt and output lengths of recent requests."""

from __future__ import annotations

from typing import Final

# Weight that earlier requests keep with each new request.
MEMORY: Final = 0.98
MIN_REQUESTS: Final = 8


class RequestLengths:
    """Mean output length, and mean prompt length without cached tokens."""

    def __init__(self) -> None:
        self._outputs = self._departed = 0.0
        self._prefilled = self._admitted = 0.0

    def record_departure(self, outputs: int) -> None:
        self._outputs = MEMORY * self._outputs + outputs
        self._departed = MEMORY * self._departed + 1

    def record_admission(self) -> None:
        self._prefilled *= MEMORY
        self._admitted = MEMORY * self._admitted + 1

    def record_prefill(self, tokens: int) -> None:
        self._prefilled += tokens

    @property
    def is_known(self) -> bool:
        return min(self._departed, self._admitted) >= MIN_REQUESTS and self._prefilled > 0

    @property
    def mean_output(self) -> float:
        """Return the mean decode steps of a request; prefill computes the first token."""
        return max(self._outputs / self._departed - 1, 1.0)

    @property
    def mean_prompt(self) -> float:
        """Return the mean prefill tokens of a request."""
        return max(self._prefilled / self._admitted, 1.0)
