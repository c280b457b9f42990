"""Gradients: when they are reduced, in which buckets and formats, and what waits for them."""
