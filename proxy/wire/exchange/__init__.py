"""One request on its way from a client to a worker and back."""
