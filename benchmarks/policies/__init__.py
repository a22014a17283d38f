"""Each policy's targets, measured on real workers."""
