"""Connections to workers."""
