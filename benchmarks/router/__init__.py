"""What a router costs beside the Rust ones: `make bench-router`."""
