"""Ask the ranks of a running job for another capture, by a file in its run directory, and wait for it."""

from __future__ import annotations

import contextlib
import math
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tracedoc.errors import InputError
from tracedoc.run.flight import FLIGHT_SUFFIX, STACK_SUFFIX
from tracedoc.run.manifest import (
    COMPLETE,
    MANIFEST_SCHEMA,
    NOTHING,
    PART_SUFFIX,
    PARTIAL,
    REQUEST_NAME,
    SECONDS_BETWEEN_LOOKS,
    STEPS_SAMPLED,
    VARIABLE,
    Part,
    Request,
    is_running,
    read_parts,
    read_request,
    write_json,
)
from tracedoc.run.steplog import MAX_STEP_LOG_BYTES, STEP, parse_step_log
from tracedoc.run.untrusted import UnusableError, inside, read_bounded

SECONDS_TO_CONNECT = 10.0
"""How long a server of a running job may take to accept a connection."""


def newest_ranks(parts: Sequence[Part]) -> list[Part]:
    """The parts of the ranks of the job's last start."""
    ranks = [part for part in parts if part.get("part") == "rank"]
    starts = [int(str(part.get("restart", 0))) for part in ranks]
    return [part for part, start in zip(ranks, starts, strict=True) if start == max(starts)]


def write_part(
    folder: Path,
    *,
    rank: int,
    world_size: int,
    host: str,
    server: str,
    seconds: float,
    name: str,
    reason: str,
    **more: object,
) -> None:
    """Write the part of a rank whose trace is the file ``name``, "" for none; ``reason`` is what is wrong."""
    part: dict[str, object] = {
        "schema": MANIFEST_SCHEMA,
        "part": "rank",
        "rank": rank,
        "world_size": world_size,
        "host": host,
        "level": "full",
        "state": NOTHING if not name else PARTIAL if reason else COMPLETE,
        "reason": reason,
        "captured_from": {"server": server, "seconds": seconds},
        "not_known": ["steps", "step_log", "environment", "framework", "clocks"],
        **more,
    }
    if name:
        part |= {"file": name, "bytes": (folder / name).stat().st_size}
    write_json(folder / f"rank-{rank}{PART_SUFFIX}", part)


SECONDS_STILL = 60.0
"""A job whose ranks take no step for so long after a request stands still."""

_LEAD_S = 4 * SECONDS_BETWEEN_LOOKS
_BETWEEN_GLANCES_S = 0.02
_LATEST_STEPS = 20
_SHORTEST_STEP_S = 0.001


def live_ranks(folder: Path) -> list[Part]:
    """The parts of the ranks of a run that take requests; raises :class:`InputError` where there are none."""
    parts = read_parts(folder)
    ranks = newest_ranks(parts)
    if not ranks:
        raise InputError(f"{folder} is no run directory of a job that runs", "give the folder that -o named")
    live = [part for part in ranks if part.get("live")]
    if not live:
        raise InputError(
            f"the job of {folder} takes no requests",
            f"start it so: {VARIABLE}=1 tracedoc collect -- COMMAND, or with tracedoc.live() in its script",
        )
    nodes = [part for part in parts if part.get("part") == "node"]
    if any(part.get("ended") for part in live) or (nodes and all(node.get("ended") for node in nodes)):
        raise InputError(f"the job of {folder} has ended", "what was captured is in its folder")
    return live


def step_logs(folder: Path, ranks: Sequence[Part]) -> dict[int, list[tuple[int, int, int]]]:
    """Of each rank with a log: number, end and length of its steps, in ns, in order."""
    found = {}
    for part in ranks:
        with contextlib.suppress(UnusableError):
            path = inside(folder, str(part.get("step_log")))
            log = parse_step_log(read_bounded(path, MAX_STEP_LOG_BYTES))
            if log is not None and (steps := log.of_kind(STEP)):
                found[int(str(part["rank"]))] = steps
    return found


def last_steps(folder: Path, ranks: Sequence[Part]) -> dict[int, int]:
    """The number of the last step of each rank with a log."""
    return {rank: steps[-1][0] for rank, steps in step_logs(folder, ranks).items()}


def ask(folder: Path, *, warmup: int, active: int) -> tuple[Request, list[Part]]:
    """Write a request, and return it with the parts of the ranks that it is for.

    Recording begins at a step that no rank has reached, and that all of them have seen the request before.
    Without ``active`` steps no log is read.
    """
    ranks = live_ranks(folder)
    logs = step_logs(folder, ranks) if active else {}
    number = 1
    while (folder / f"again-{number}").exists():
        number += 1
    number = max(number, getattr(read_request(folder), "number", 0) + 1)
    newest = max((steps[-1][0] for steps in logs.values()), default=0)
    lengths = [length for steps in logs.values() for _, _, length in steps[-_LATEST_STEPS:]]
    usual_s = max(statistics.median(lengths) / 1e9 if lengths else 0.0, _SHORTEST_STEP_S)
    # The log counts from the first step that ended, the ranks count steps that have ended.
    at = newest + 2 + math.ceil(_LEAD_S / usual_s)
    request = Request(number, at, warmup, active)
    try:
        (folder / request.folder).mkdir()
        write_json(folder / REQUEST_NAME, asdict(request))
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror}", "ask as the job's user") from None
    return request, ranks


def wait_for(folder: Path, request: Request, ranks: Sequence[Part]) -> bool:
    """Wait until the ranks have captured; return whether they went on, and did not stand still.

    Raises :class:`InputError` where the processes are gone.
    """
    target = folder / request.folder
    patience = int(SECONDS_STILL / SECONDS_BETWEEN_LOOKS)
    still_since, seen = time.monotonic(), last_steps(folder, ranks)
    while True:
        parts = {part["rank"]: part for part in read_parts(target) if part.get("part") == "rank"}
        states = [parts[part["rank"]].get("state") if part["rank"] in parts else "" for part in ranks]
        if all(state in (COMPLETE, PARTIAL, NOTHING) for state in states):
            # Their step with stacks comes last; ranks that recorded one before will again.
            lacks = [part for part in ranks if "source" in part and "source" not in parts[part["rank"]]]
            if not lacks or patience <= 0:
                return True
            patience -= 1
        gone = [
            part
            for part in ranks
            if part.get("host") == socket.gethostname() and not is_running(int(str(part["pid"])))
        ]
        if gone:
            raise InputError(f"the job of {folder} has ended meanwhile", "what was captured is in its folder")
        time.sleep(SECONDS_BETWEEN_LOOKS)
        now = last_steps(folder, ranks)
        if now != seen:
            still_since, seen = time.monotonic(), now
        elif time.monotonic() - still_since > SECONDS_STILL:
            return False


def wait_for_dumps(folder: Path, request: Request, ranks: Sequence[Part], step_s: float) -> list[Path]:
    """The dumps that ranks whose steps take ``step_s`` write at once, after some steps at most."""
    patience_s = 4 * SECONDS_BETWEEN_LOOKS + STEPS_SAMPLED * step_s
    before: set[Path] = set()
    for _ in range(math.ceil(patience_s / _BETWEEN_GLANCES_S)):
        found = set((folder / request.folder).glob(f"*{FLIGHT_SUFFIX}{STACK_SUFFIX}"))
        # A rank may write two.
        if found == before and len({path.name.partition(".")[0] for path in found}) >= len(ranks):
            break
        before = found
        time.sleep(_BETWEEN_GLANCES_S)
    return sorted(path.with_suffix("") for path in before)
