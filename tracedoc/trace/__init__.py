"""One trace file -> one Trace: columns of events, and nothing judged."""
