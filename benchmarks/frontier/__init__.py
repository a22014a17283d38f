"""Each policy variant against the baselines, in each cell of machine, budget and load."""
