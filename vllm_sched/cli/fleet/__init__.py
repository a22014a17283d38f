"""Commands that run and inspect a fleet."""
