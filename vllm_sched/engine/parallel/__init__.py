"""What engines of one data-parallel group share."""
