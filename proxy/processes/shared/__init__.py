"""State that several router processes of one host share."""
