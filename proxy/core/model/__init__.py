"""The types that the rest of the core uses."""
