"""Models of what a step costs: pure arithmetic, fitted online or taken from measurements."""
