"""What each step did, published for other programs: docs/journal.md."""
