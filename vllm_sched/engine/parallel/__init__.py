"""State that a data-parallel group shares."""
