"""The admin API: its routes, server and access control."""
