"""The search for a fleet that meets a target."""
