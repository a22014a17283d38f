"""What all tests share."""

from __future__ import annotations

import logging

# Hints about the speed of a model that is never run; each scheduler made repeats them.
for chatty in ("vllm.platforms.cpu", "vllm.config.vllm"):
    logging.getLogger(chatty).setLevel(logging.ERROR)
