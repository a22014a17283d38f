"""From the bytes of a request to what the core knows of it."""
