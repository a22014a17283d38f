"""Workers found through Kubernetes, DNS and endpoint files."""
