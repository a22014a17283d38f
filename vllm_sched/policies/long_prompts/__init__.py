"""Parts of the policy `long_prompt`."""
