"""Step times of a running worker."""
