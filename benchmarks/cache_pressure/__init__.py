"""What the router gains from knowing the caches, when prefixes do not fit into them."""
