"""Files of requests that are run in the gaps: OpenAI's `/v1/files` and `/v1/batches`."""
