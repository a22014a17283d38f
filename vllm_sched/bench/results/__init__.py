"""Outcomes of requests and the figures computed from them."""
