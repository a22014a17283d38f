"""The cost of our router and of the Rust routers: `make bench-router`."""
