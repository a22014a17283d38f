"""vLLM's KV connectors, one per module: the fields that each leg of a hand-over carries."""
