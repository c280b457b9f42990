"""Runs: which files belong together, and which rank each one is. Standard library only."""
