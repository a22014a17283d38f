"""Two sides under the same load, and their reports."""
