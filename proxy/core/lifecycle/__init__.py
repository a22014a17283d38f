"""The life of a lease: billing, retries and feedback."""
