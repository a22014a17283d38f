"""One scheduling step: what the policies decide before, during and after it."""
