"""vLLM's own scheduler tests, with our schedulers in the place of upstream's."""
