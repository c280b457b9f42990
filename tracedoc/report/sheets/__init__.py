"""Comparisons, series and histories of runs as one sheet: text, Markdown, bars."""
