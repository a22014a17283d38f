"""Probes of the workers, their metrics and warm-up."""
