"""What several routers with late knowledge of each other serve, against one router."""
