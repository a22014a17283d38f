"""Sessions of many turns, for a closed loop: generated, or read from traces."""
