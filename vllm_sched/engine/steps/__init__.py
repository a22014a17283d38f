"""One scheduling step with policies."""
