"""A simulated fleet: router, workers, events."""
