"""Estimators that learn online: latency, bytes per token, prefixes, transfer time."""
