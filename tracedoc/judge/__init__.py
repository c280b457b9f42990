"""Rules over facts, the first line, and all of it composed."""
