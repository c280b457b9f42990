"""The step of all ranks on one clock, as the page, figures and Perfetto show it."""
