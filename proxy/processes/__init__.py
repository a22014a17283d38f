"""Several processes on one port, that place requests as one would."""
