"""What a capture is to hold: the options of the command line, which a file carries to the hook."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

CONFIG_NAME = "config.json"
MOST_FULL_RANKS = 16
"""Up to so many ranks are all captured in full: beyond, the files cost more than they show."""


@dataclass(frozen=True, slots=True)
class Options:
    """The capture that every rank makes; steps are optimizer steps, counted from 0 on every rank alike.

    ``wait`` steps pass unwatched, ``warmup`` steps with the profiler armed; then ``active`` steps are
    recorded, and one more, because the last step's end on the GPU is the next one's beginning.
    ``nccl_log`` keeps what NCCL says of all ranks; ``None`` reads that of the first rank of each node, and
    keeps no file. ``max_seconds`` bounds recording and writing each, ``max_mb`` the trace of a rank before
    compression.
    A ``trial`` records nothing: ``wait`` steps pass, ``active`` ones are timed with ``changes`` made to the
    job.
    """

    folder: str
    run: str = ""
    wait: int = 5
    warmup: int = 1
    active: int = 5
    ranks: str = "auto"
    max_seconds: float = 300.0
    max_mb: float = 500.0
    record_shapes: bool = True
    with_stack: bool = False
    profile_memory: bool = False
    nccl_log: bool | None = None
    exit_after_capture: bool = False
    source_step: bool = True
    trial: bool = False
    changes: tuple[str, ...] = ()

    @property
    def start(self) -> int:
        """The number of finished steps at which the profiler is armed; a rank shows itself by its first."""
        return max(1, self.wait)

    @property
    def cycle(self) -> int:
        """How many steps later a capture that another profiler held up is tried again."""
        return self.start + self.warmup + self.active + 1


def write_options(options: Options, folder: Path) -> None:
    """Write the options beside the hook: environment variables do not reach every rank of every launcher."""
    (folder / CONFIG_NAME).write_text(json.dumps(asdict(options), indent=1), encoding="utf-8")


def read_options(path: Path) -> Options:
    """Return the options in a file; what an other version of tracedoc wrote beside them is left out."""
    content = json.loads(path.read_text(encoding="utf-8"))
    known = {field.name for field in fields(Options)}
    return Options(**{name: value for name, value in content.items() if name in known})


def listed_ranks(text: str) -> frozenset[int] | None:
    """Return the ranks of ``0,4-7``, none for ``none``, and ``None`` for ``all`` and ``auto``.

    Raises ``ValueError`` for anything else.
    """
    if text in ("all", "auto"):
        return None
    if text == "none":
        return frozenset()
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if dash and int(last) < int(first):
            raise ValueError(text)
        ranks.update(range(int(first), int(last if dash else first) + 1))
    return frozenset(ranks)


def level_of(options: Options, rank: int, world_size: int, role_rank: int) -> str:
    """The level that a rank records at: ``full``, ``light`` (device activity only), or ``""`` for nothing.

    ``role_rank`` is the rank among the workers of one role; the first of each role stands for the others.
    """
    chosen = listed_ranks(options.ranks)
    if chosen is not None:
        return "full" if rank in chosen else ""
    if options.ranks == "all" or world_size <= MOST_FULL_RANKS or role_rank == 0:
        return "full"
    return "light"
