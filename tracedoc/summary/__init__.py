"""The answer in one line."""
