"""Pipelines: stages, bubbles, and what stages and layers that are split over ranks exchange."""
