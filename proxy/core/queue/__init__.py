"""Requests that wait: buckets, dispatch, fairness, eviction and admission."""
