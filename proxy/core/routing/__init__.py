"""Routing rules, one file each."""
