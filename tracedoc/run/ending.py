"""Say how a job ended that did not end well: which rank went first, after which step, and how.

Standard library only.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from datetime import datetime

from tracedoc.errors import Limit
from tracedoc.run.job import step_log_of
from tracedoc.run.manifest import BY_SIGNAL, Manifest, ManifestRank
from tracedoc.run.steplog import STEP, WRITTEN_WITHIN_NS

MAX_RANKS = 64
"""The logs of at most this many ranks are read for when they were last alive."""

_RAISED = " ended by "
_TOLD_TO_END = frozenset({-signal.SIGTERM, BY_SIGNAL + signal.SIGTERM})


@dataclass(frozen=True, slots=True)
class _End:
    """The end of one rank.

    ``code`` is its exit code, or minus the signal that ended it, ``None`` where it is unknown; ``error`` the
    exception that ended it; ``last_step`` the number of the last step that it finished, from 0, or a later
    one that its log ``may_lack``; ``at_ns`` its last sign of life.
    """

    rank: int
    code: int | None
    error: str
    last_step: int | None
    may_lack: bool
    at_ns: int

    @property
    def was_ended_by_launcher(self) -> bool:
        """Whether its launcher ended it, which launchers do to all ranks once one has failed."""
        return self.code in _TOLD_TO_END


def ending_limits(manifest: Manifest | None) -> list[Limit]:
    """Return one limit where the job did not end well or its end was not seen, none where it did."""
    words = how_it_ended(manifest)
    if words:
        return [Limit("job-failed", words, "what was captured before is analysed")]
    if manifest is not None and any(not node.get("ended") for node in manifest.nodes):
        return [
            Limit(
                "job-unfinished",
                "`tracedoc collect` did not see the end of the job: it still runs, or both were killed",
                "what was captured until now is analysed",
            )
        ]
    return []


def ended_well(manifest: Manifest | None) -> bool:
    """True if the job is known to have ended with exit code 0 on all nodes."""
    nodes = manifest.nodes if manifest is not None else ()
    return bool(nodes) and all(node.get("ended") and _number(node.get("exit_code")) == 0 for node in nodes)


def how_it_ended(manifest: Manifest | None) -> str:
    """The end of a failed job in words, as ``rank 1 ended after step 14 with exit code 1``.

    It is "" for a job that ended well, and for one whose end is not known.
    """
    codes = [_number(node.get("exit_code")) for node in manifest.nodes] if manifest is not None else []
    bad = [code for code in codes if code]
    if manifest is None or not bad:
        return ""
    ranks = (*manifest.ranks, *manifest.silent)
    # The command of a job of one process is that process.
    alone = bad[0] if len(ranks) == 1 and len(codes) == 1 else None
    ends = [_end(entry, alone) for entry in ranks[:MAX_RANKS] if _ended_badly(entry, alone)]
    if not ends:
        return f"the job ended {_with(bad[0], '')}"
    first = min(ends, key=lambda end: (end.was_ended_by_launcher, end.at_ns, end.rank))
    step = ""
    if first.last_step is not None:
        # Ranks step together: where others are well ahead, this one's last records are lost.
        lost = first.may_lack or max(entry.steps_total for entry in ranks) > first.last_step + 2
        step = f" after step {first.last_step}{' or later' if lost else ''}"
    return f"rank {first.rank} ended{step} {_with(first.code, first.error)}"


def _ended_badly(entry: ManifestRank, alone: int | None) -> bool:
    part = entry.part or {}
    end = part.get("end")
    if _number(part.get("exit_code")) or alone:
        return True
    return not isinstance(end, str) or _RAISED in end


def _end(entry: ManifestRank, alone: int | None) -> _End:
    part = entry.part or {}
    end = part.get("end")
    error = end.partition(_RAISED)[2] if isinstance(end, str) else ""
    code = _number(part.get("exit_code"))
    last, at_ns, length_ns = _last_step(entry)
    may_lack = 0 < length_ns < WRITTEN_WITHIN_NS
    if isinstance(end, str) and entry.steps_total:
        last, may_lack = entry.steps_total - 1, False
    at_ns = max(at_ns, _moment_ns(part.get("ended")))
    if not at_ns:
        at_ns = _number(part.get("exited_ns")) or 0
    return _End(entry.rank, alone if code is None else code, error, last, may_lack, at_ns)


def _last_step(entry: ManifestRank) -> tuple[int | None, int, int]:
    """Return number, end and length of the last step in the log of a rank, ``None`` and 0 without."""
    log = step_log_of(entry, [])
    steps = log.of_kind(STEP) if log is not None else []
    return steps[-1] if steps else (None, 0, 0)


def _with(code: int | None, error: str) -> str:
    named = f" ({error})" if error else ""
    if code is None:
        return f"by {error}" if error else "without a word: it was killed, or left by os._exit"
    number = -code if code < 0 else code - BY_SIGNAL if code > BY_SIGNAL else 0
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"with exit code {code}{named}"
    # What the kernel ends for lack of memory goes like this.
    why = ", perhaps for lack of memory" if name == "SIGKILL" else ""
    return f"by {name}{named}{why}"


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _moment_ns(text: object) -> int:
    try:
        return int(datetime.fromisoformat(text).timestamp() * 1e9) if isinstance(text, str) else 0
    except (ValueError, OverflowError):
        return 0
