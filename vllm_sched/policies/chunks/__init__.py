"""Parts of the policy `chunk_budget`."""
