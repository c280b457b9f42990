"""Facts: what was measured, with units, scopes and definitions; no opinions.

``per_rank`` facts are computed in the worker, ``per_run`` facts from the digests of all ranks. Importing
either package adds its facts to :data:`tracedoc.facts.catalog.CATALOG`.
"""
