"""Search for a fleet that meets its targets."""
