"""The collector: a hook in each rank of an unmodified job writes a trace and facts; it never analyses."""
