"""Figures for slides and papers."""
