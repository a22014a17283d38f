"""Decisions, without sockets and without a clock."""
