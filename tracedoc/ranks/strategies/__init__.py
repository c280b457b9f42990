"""Recognise how a job is parallelised from the annotations and operators of its traces."""
