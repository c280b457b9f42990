"""Decode one file with ``json.loads`` and count the events: a floor for readers in Python."""

from __future__ import annotations

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    print(len(json.loads(Path(sys.argv[1]).read_bytes())["traceEvents"]))
