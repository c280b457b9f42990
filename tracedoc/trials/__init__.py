"""Fixes tried on the job itself, in turns with the job as it is."""
