"""The calls of operators: what they were given, and what they compute and move."""
