"""Coding agents' sessions on several routing rules, in virtual time and on real workers."""
