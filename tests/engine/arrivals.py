"""Who comes to the one engine and its simulation: some while others decode, too many at once."""

from __future__ import annotations

# In which step it arrives, prompt, output, lane.
ARRIVALS = [
    (0, 40, 30, None), (0, 300, 12, "batch"), (3, 1500, 6, None), (5, 700, 12, "urgent"),
    (5, 7, 24, "batch"), (8, 1200, 6, "batch"), (12, 64, 24, "urgent"), (14, 900, 12, None),
    (20, 128, 8, None), (24, 500, 8, "batch"), (30, 33, 16, "urgent"), (31, 1000, 4, None),
]  # fmt: skip
