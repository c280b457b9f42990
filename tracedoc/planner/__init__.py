"""Memory, traffic and time of training strategies: what fits, what it costs, which to choose."""
