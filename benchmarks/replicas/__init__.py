"""What several routers with shared state cost, and what they keep to, against one router."""
