"""The waiting queue, its lanes, and the slots of LoRA adapters."""
