"""Requests between a client and a worker."""
