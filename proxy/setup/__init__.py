"""From the fleet file to running objects."""
