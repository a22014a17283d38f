"""How often Python looks for cycles of dead objects in a router."""

from __future__ import annotations

import gc

# Objects made since the last collection; collections of the youngest, and of the middle. Requests
# leave no cycles behind: by its defaults it would find nothing each thirty of them.
SELDOM = 10_000, 20, 20


def settle() -> None:
    """Once all is set up: what is here now stays, and need not be looked at again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*SELDOM)
