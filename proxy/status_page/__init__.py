"""The status page and the data behind it."""
