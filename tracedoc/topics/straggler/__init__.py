"""A rank was late, and the others waited for it."""
