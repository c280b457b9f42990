"""What facts are, and how those of a run are measured. They themselves are in :mod:`tracedoc.topics`."""
