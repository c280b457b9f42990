"""Memory, traffic and time of training strategies: what fits, what it costs, which to choose."""

from tracedoc.planner.fitting import Fit, KnownRun, what_fits
from tracedoc.planner.memory import Room, fits_instead, fits_without_sharding

__all__ = ["Fit", "KnownRun", "Room", "fits_instead", "fits_without_sharding", "what_fits"]
