"""SQLite storage of files, batches and results."""
