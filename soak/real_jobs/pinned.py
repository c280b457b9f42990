"""Something that is imported first pins every rank to the first core: ``pinned.py together``, or to its own: ``apart``."""

import os
import sys

cores = sorted(os.sched_getaffinity(0))
mine = int(os.environ["LOCAL_RANK"]) if sys.argv[1] == "apart" else 0
os.sched_setaffinity(0, {cores[mine % len(cores)]})

import healthy  # noqa: E402, F401
