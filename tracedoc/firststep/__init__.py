"""Run a script's first training step under fake tensors: what it would allocate and compute."""
