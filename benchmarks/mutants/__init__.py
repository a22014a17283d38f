"""Mutation testing: the share of small faults in the source that the tests catch."""
