"""Draw what a collector leaves beside the traces: a manifest, and the log of every step.

A log is drawn in words: ``100 x50`` are fifty steps of 100 ms, ``400 gc 300`` is one of 400 ms in which a
garbage collection took 300, ``400 wait 300`` one in which the training thread waited 300 for a free core. The
numbers of its steps begin at 1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tracedoc.run.manifest import MANIFEST_NAME, MANIFEST_SCHEMA
from tracedoc.run.steplog import CAPACITY, COLLECTION, CORE_WAIT, HEADER, MAGIC, RECORD, STEP

_BEGAN_NS = 1_700_000_000_000_000_000


def draw_log(words: str, *, rank: int = 0) -> bytes:
    """Return the bytes of a step log; raises :class:`ValueError` for words that are none."""
    content = [HEADER.pack(MAGIC, rank, CAPACITY, _BEGAN_NS)]
    end, number = _BEGAN_NS, 0
    tokens = words.split()
    while tokens:
        length = _ns(tokens.pop(0))
        times, pause, waited = 1, 0, 0
        if tokens and tokens[0].startswith("x"):
            times = int(tokens.pop(0)[1:])
        if len(tokens) > 1 and tokens[0] == "gc":
            pause = _ns(tokens[1])
            del tokens[:2]
        if len(tokens) > 1 and tokens[0] == "wait":
            waited = _ns(tokens[1])
            del tokens[:2]
        for _ in range(times):
            end += length
            number += 1
            if pause:
                content.append(RECORD.pack(2, COLLECTION, end - 1, pause))
            if waited:
                content.append(RECORD.pack(number, CORE_WAIT, end, waited))
            content.append(RECORD.pack(number, STEP, end, length))
    return b"".join(content)


def _ns(word: str) -> int:
    return round(float(word) * 1e6)


def write_job(folder: Path, ranks: Sequence[int], part: Mapping[str, object], log: str) -> None:
    """Write a manifest in which each rank says ``part``, and the log of each rank where ``log`` draws one."""
    entries = {}
    for rank in ranks:
        entry = {"file": f"rank-{rank}.json", "host": "node", "environment": {}, **part}
        if log:
            entry["step_log"] = f"rank-{rank}.steps"
            (folder / f"rank-{rank}.steps").write_bytes(draw_log(log, rank=rank))
        entries[str(rank)] = entry
    manifest = {"schema": MANIFEST_SCHEMA, "ranks": entries}
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest), encoding="utf-8")
