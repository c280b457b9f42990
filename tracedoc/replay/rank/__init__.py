"""The program of one rank's step, made in the worker from its timeline."""
