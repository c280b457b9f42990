"""How a job is parallelised, told from the annotations and operators of its traces."""
