"""Stragglers: which ranks the others wait for, what that costs, and why."""
