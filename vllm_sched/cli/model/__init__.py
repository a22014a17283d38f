"""Commands that calculate with a cost model."""
