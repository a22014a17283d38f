"""The files and the database behind the Files and Batches API."""
