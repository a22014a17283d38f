"""Arrival times and lengths of requests, for a client and a simulator."""
