"""All ranks together: matching, clocks, groups, waiting, and which rank the others wait for."""
