"""Tenants, their keys and limits."""
