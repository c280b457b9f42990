"""Kernels and arithmetic: what the GPU computes, in which format, and how fast."""
