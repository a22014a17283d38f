"""Parts of the policy `deferred_prefill`."""
