"""Step: how long it is, how its time splits over phases, and how steps of the log differ."""
