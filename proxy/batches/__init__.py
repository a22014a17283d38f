"""OpenAI's `/v1/files` and `/v1/batches`: requests from files, run on spare capacity."""
