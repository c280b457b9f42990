"""Ranks are the stages of a pipeline, which wait for each other."""
