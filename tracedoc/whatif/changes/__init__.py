"""Changes of a run that can be replayed: each edits the run's program as a fix would."""
