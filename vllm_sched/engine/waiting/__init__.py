"""Requests that wait in the engine: the queue, its lanes, and the slots of LoRA adapters."""
