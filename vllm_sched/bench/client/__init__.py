"""Plays traffic against a live endpoint: a light client that notices when it is too slow."""
