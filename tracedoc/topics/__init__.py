"""One room for each cause: what is measured of a rank (``rank.py``), and of the run (``run.py``)."""
