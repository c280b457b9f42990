"""Facts: what was measured, with units, scopes and definitions; no opinions."""
