"""A router under load while faults are injected into its workers."""
