"""What if a cause were removed: bounded gains, never summed over the same time."""
