"""Requests with prefill and decode on different workers."""
