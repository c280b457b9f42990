"""Job and capture: the strategy, what was seen of the run, and what the profiler cost."""
