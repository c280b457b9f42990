"""Compare two runs: what a change did, and what is lost from fewer GPUs to more."""
