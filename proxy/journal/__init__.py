"""Reads what the engines publish about their steps: docs/journal.md."""
