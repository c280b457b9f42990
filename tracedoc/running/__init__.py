"""A job that runs: captures asked of it, and its step logs followed."""
