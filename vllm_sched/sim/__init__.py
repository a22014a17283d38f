"""Fleet simulation in virtual time, with the real policies and the real router core."""
