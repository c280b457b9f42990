"""Host and idle time: what the host does while the GPU has nothing to run."""
