"""Name resolution and TLS."""
