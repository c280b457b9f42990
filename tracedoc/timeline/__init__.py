"""Traces -> timelines: what each GPU did in each step, and how ranks' collectives belong together."""
