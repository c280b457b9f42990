"""Write what PyTorch's flight recorders hold of this process: the collectives that its rank entered."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from tracedoc.collector.probe import loaded, probe
from tracedoc.run.flight import FLIGHT_SUFFIX, STACK_SUFFIX
from tracedoc.run.manifest import replace_file

_RECORDERS = (("_dump_fr_trace", FLIGHT_SUFFIX), ("_dump_nccl_trace", f".nccl{FLIGHT_SUFFIX}"))
"""The recorders of a process, and what the names of their dumps end with."""


def write_dumps(folder: Path, stem: str, stack: Sequence[str] = ()) -> None:
    """Write the dumps of a rank whose files begin with ``stem``, and the stack of its training thread.

    Where the process has no recorder, or the folder cannot be written, there is none; nothing is raised.
    """
    c10d = loaded("torch._C._distributed_c10d")
    for name, suffix in _RECORDERS:
        # Calls with their stacks, those that have ended too.
        content = probe(lambda name=name: getattr(c10d, name)(True, True, False))
        if isinstance(content, bytes) and content:
            target = folder / (stem + suffix)
            probe(replace_file, target, content)
            probe(replace_file, target.with_name(target.name + STACK_SUFFIX), "\n".join(stack).encode())


def remove_dumps(folder: Path, stem: str) -> None:
    """Remove what was written of a rank: it goes on, so that its dumps say nothing any more."""
    for _, suffix in _RECORDERS:
        for name in (stem + suffix, stem + suffix + STACK_SUFFIX):
            with contextlib.suppress(OSError):
                (folder / name).unlink()
