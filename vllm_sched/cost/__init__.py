"""Models of step cost: pure arithmetic, fitted online or taken from measurements."""
