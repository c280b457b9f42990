"""tracedoc: why is my multi-GPU training slow, what to change, and how much would it give back."""

__version__ = "0.1.0"
