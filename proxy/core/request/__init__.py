"""Parsing, measuring and editing of requests."""
