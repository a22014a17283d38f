"""Bytes: HTTP/1.1 on both sides, and what is between."""
