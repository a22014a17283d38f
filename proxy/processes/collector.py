"""What Python's collector of dead cycles has to look at in a router."""

from __future__ import annotations

import gc


def settle() -> None:
    """Once all is set up: what is here now stays, and need not be looked at again and again."""
    gc.collect()
    gc.freeze()
