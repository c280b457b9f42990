"""Turn the trace of one rank into its timeline: what the GPU did in each step."""
