"""State that router processes share in memory."""
