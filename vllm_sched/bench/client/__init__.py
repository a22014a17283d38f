"""Plays traffic against a live endpoint; the client reports when it is too slow itself."""
