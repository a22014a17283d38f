"""What all tests share."""

from __future__ import annotations

import logging

from hypothesis import settings

# Tests that choose at random choose the same in each run, so that a change is judged by itself;
# `make explore` has them choose anew.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile("fixed")

# Hints about the speed of a model that is never run; each scheduler made repeats them.
for chatty in ("vllm.platforms.cpu", "vllm.config.vllm"):
    logging.getLogger(chatty).setLevel(logging.ERROR)
