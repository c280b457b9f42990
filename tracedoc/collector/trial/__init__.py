"""A trial inside the job: what a change sets, and the rank that makes it and times steps."""
