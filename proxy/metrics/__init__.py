"""The router's Prometheus metrics."""
