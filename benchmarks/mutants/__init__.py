"""What the tests catch: mutants of the source, and the share of them that a test fails on."""
