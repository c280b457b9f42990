"""All ranks together: matching, clocks, groups, waiting, and who is waited for."""
