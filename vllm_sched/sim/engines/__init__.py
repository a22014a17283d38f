"""Simulated engines: exact and fluid."""
