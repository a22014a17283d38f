"""Parts of the policy `lanes`."""
