"""The capture of one rank: when it records, how it ends, and what its part of the manifest says of it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from tracedoc.collector.evidence import Evidence
from tracedoc.collector.live import LONGEST_LAST_WORDS_S, SIGTERM, EndWatch, RequestWatch
from tracedoc.collector.options import Options, level_of
from tracedoc.collector.recorder import (
    ForeignProfilers,
    Recorder,
    SourceStep,
    common_step,
    is_source_rank,
)
from tracedoc.collector.steps import SAMPLED_STEPS, StepClock, StepTimes
from tracedoc.run.manifest import (
    COMPLETE,
    NOTHING,
    PART_SUFFIX,
    PARTIAL,
    RECORDING,
    VARIABLE,
    WAITING,
    WRITING,
    Request,
    timestamp,
    write_json,
)

_BEFORE, _OPEN, _CLOSING, _AFTER, _DONE = range(5)
"""Where a capture stands: not begun, armed or recording, trace on its way, steps still timed, all done."""


_OF_ONE_CAPTURE = frozenset(("file", "bytes", "json_bytes", "source", "window", "evidence_errors", "live"))
"""What a rank's part says of one capture, not of the job."""


class Session:
    """The capture of this rank, driven by :meth:`step`.

    ``part`` is the rank's part of the manifest. Every public method runs under one lock, since a signal or
    the time limit may end the capture from another thread.
    """

    def __init__(
        self,
        torch: ModuleType,
        options: Options,
        identity: dict[str, Any],
        foreign: ForeignProfilers,
        clock: StepClock,
    ) -> None:
        self.part: dict[str, Any] = {"schema": 1, "part": "rank", **identity, "state": WAITING, "reason": ""}
        self._torch, self._options = torch, options
        self._level = identity["level"]
        self._folder = Path(options.folder)
        self._stem = str(identity["stem"])
        self._foreign, self._clock = foreign, clock
        self._times = StepTimes()
        self._lock = threading.RLock()
        # The thread that writes the trace must not wait for one that waits for it.
        self._part_lock = threading.RLock()
        self._phase = _BEFORE if self._level else _DONE
        self._start = options.start
        self._leave_at = options.start + options.warmup + options.active + 1 + SAMPLED_STEPS
        # Every rank stays for the step that some of them record with stacks.
        self._leave_at += int(options.source_step)
        self._source_at = 0
        self._source: SourceStep | None = None
        self._writing_source: SourceStep | None = None
        self._recorder: Recorder | None = None
        self._watch: EndWatch | None = None
        self._writer: threading.Thread | None = None
        self._owner = threading.get_ident()
        self._first = self._recorded = 0
        self._stop_asked = ""
        self._told = False
        self._evidence: Evidence | None = None
        self._tell_step: Callable[[int], None] | None = None
        self.count = 0
        self._last_ns = 0
        self._requests: RequestWatch | None = None
        self._again: Request | None = None
        self._home: tuple[dict[str, Any], Path] | None = None

    # The life of a rank.

    def first_step(self, stepped: object) -> None:
        """Begin: the step that just ended shows that the process is a rank."""
        self.count = 1
        self.part["clock"] = self._clock.name
        self.part["started"] = timestamp()
        if not self._level:
            self.part.update(state=NOTHING, reason="not among the ranks that were asked for (--ranks)")
        config = {name: getattr(self._options, name) for name in self._options.__slots__}
        for name in ("rank", "local_rank", "world_size", "restart", "stem"):
            config[name] = self.part[name]
        try:
            self._evidence = Evidence(config)
            self._tell_step = self._evidence.step
        except Exception as error:
            self._miss("on_start", error)
        self._ask(Evidence.on_start)
        self._ask(Evidence.on_first_step, stepped)
        if os.environ.get(VARIABLE, "0") not in ("", "0"):
            self.take_requests()
        self.write_part()
        self._advance(0)
        self._last_ns = time.perf_counter_ns()

    def step(self, stepped: object = None) -> bool:
        """Count a step that just ended; return whether the job is to end here (``--exit-after-capture``).

        Whoever ``stepped`` is the same to a capture.
        """
        now_ns = time.perf_counter_ns()
        elapsed_ns = now_ns - self._last_ns
        self.count += 1
        phase = self._phase
        if phase == _BEFORE:
            if not self._foreign.active:
                self._times.before.append(elapsed_ns)
            if self.count == self._start:
                self._advance(elapsed_ns)
        elif phase == _OPEN:
            self._advance(elapsed_ns)
        elif phase == _AFTER:
            self._times.after.append(elapsed_ns)
            if self._times.enough:
                self._phase = _DONE
                self.write_part()
                self._plan_source()
        elif phase == _DONE:
            if self._source is not None:
                self._end_source()
            elif self.count == self._source_at:
                self._begin_source()
            elif self._writing_source is not None and not self._writing_source.is_writing:
                self._writing_source = None
                self._ask(Evidence.on_written)
            elif self._again is not None and self.count > self._source_at:
                self._plan_again(self._again)
        elif phase == _CLOSING and not self._is_writing():
            # From the next step on: this one still had the writer beside it.
            self._phase = _AFTER
            self._ask(Evidence.on_written)
            self._end_watch()
        after_ns = time.perf_counter_ns()
        if self._tell_step is not None:
            try:
                self._tell_step(after_ns)
            except Exception as error:
                self._tell_step = None
                self._miss("on_step", error)
        self._last_ns = now_ns if self._phase == phase == _BEFORE else after_ns
        return self._options.exit_after_capture and self.count >= self._leave_at

    def take_requests(self) -> None:
        """Watch for requests for another capture from now on."""
        if self._requests is None:
            self.part["live"] = True
            self._requests = RequestWatch(self._folder, self._stem, self._asked, lambda: self.count)
            self._requests.begin()

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be recorded, and all of it is written or on its way."""
        return self._phase == _DONE and self._source is None and self.count >= self._leave_at

    def end(self, reason: str) -> None:
        """Finish in an orderly end of the process; ``reason`` says what ended it, as ``the job ended``."""
        with self._lock:
            ended = f"{reason} after {self.count} steps"
            if self._phase == _OPEN:
                self._finish(PARTIAL, ended, wait=True)
            elif self._phase == _BEFORE:
                begin, before = self._start + self._options.warmup, self.part.get("reason")
                why = f"{ended}; recording was to begin after {begin} (--wait, --warmup)"
                if before:  # held up by a profiler of the job, which no --wait changes
                    why = f"{before}; {ended}, before the next try at {begin}"
                self.part.update(state=NOTHING, reason=why)
            self._drop_source()
        if self._writer is not None:
            self._writer.join(self._options.max_seconds)
        if self._writing_source is not None:
            self._writing_source.wait()
        self._end_watch()
        self._ask(Evidence.on_exit)
        if self._requests is not None:
            self._requests.end()
        self.part.update(ended=timestamp(), end=reason)
        self.write_part()
        if self._home is not None:
            part, self._folder = self._home
            self.part = {**part, "ended": self.part["ended"], "end": reason}
            with contextlib.suppress(OSError):
                part["steps"]["total"] = self.count
                write_json(self._folder / f"{self._stem}{PART_SUFFIX}", self.part)

    def interrupt(self, reason: str) -> None:
        """End the capture with what it holds, from any thread: a signal came, or time is up."""
        # The other thread that may hold the lock could hang with the device.
        if not self._lock.acquire(timeout=LONGEST_LAST_WORDS_S):
            return
        try:
            recorder = self._recorder
            why = "the process was asked to end (SIGTERM)" if reason == SIGTERM else reason
            if self._phase == _OPEN and recorder is not None:
                if recorder.any_thread or threading.get_ident() == self._owner:
                    self._finish(PARTIAL, why, hurried=True, wait=True)
                else:
                    # This torch would stop nothing from here, and an empty session must not be exported.
                    self._stop_asked = why
        finally:
            self._lock.release()
        if self._writer is not None and reason == SIGTERM:
            self._writer.join(LONGEST_LAST_WORDS_S)

    def give_way(self) -> None:
        """Stop at once, because the job is about to open a profiler of its own."""
        with self._lock:
            self._drop_source()
            if self._phase == _OPEN:
                self._finish(PARTIAL, "the job started a profiler of its own", again=True)

    def fail(self, error: BaseException) -> None:
        """Give up after an error of ours: stop the profiler if that can be done, and say what happened."""
        with self._lock:
            phase, self._phase = self._phase, _DONE
            if phase == _OPEN and self._recorder is not None:
                with contextlib.suppress(Exception):
                    self._recorder.stop(hurried=True)
            self._recorder = None
            self._drop_source()
            self._end_watch()
            self.part.update(state=NOTHING, reason=f"the collector failed: {type(error).__name__}: {error}")
            self.write_part()

    def forked(self) -> None:
        """Drop in a forked child what belongs to the parent."""
        self._phase, self._source, self._source_at = _DONE, None, 0
        self._evidence = self._tell_step = None
        if self._watch is not None:
            self._watch.forked()

    def write_part(self) -> None:
        """Write what is known by now; where that cannot be done, the job goes on all the same."""
        self.part["steps"] = {
            "first": self._first,
            "recorded": self._recorded,
            "asked": self._options.active + 1,
            "total": self.count,
        }
        self.part["step_ms"] = self._times.medians()
        self.part["optimizers"] = dict(self._clock.calls)
        self.part["foreign_profilers"] = self._foreign.seen
        try:
            with self._part_lock:
                write_json(self._folder / f"{self._stem}{PART_SUFFIX}", dict(self.part))
        except OSError as error:
            if not self._told:
                self._told = True
                sys.stderr.write(f"tracedoc: {self._stem} cannot write to {self._folder}: {error.strerror}\n")

    # The captured steps.

    def _advance(self, elapsed_ns: int) -> None:
        with self._lock:
            if self._phase == _BEFORE and self.count == self._start:
                self._open()
            elif self._phase == _OPEN and self._recorder is not None:
                with self._held_back():
                    self._next(self._recorder, elapsed_ns)

    def _open(self) -> None:
        if "NSYS_PROFILING_SESSION_ID" in os.environ:
            self._phase = _DONE
            self.part.update(
                state=NOTHING, reason="Nsight Systems profiles this job; the GPU has room for one"
            )
            self.write_part()
            return
        if self._foreign.one_is_open():
            self._postpone("a profiler of the job was open when recording was to begin")
            return
        recorder = Recorder(self._torch, self._options, self._level, self._foreign)
        self._recorder, self._owner = recorder, threading.get_ident()
        self._ask(Evidence.on_window_start)
        recorder.arm()
        if self._options.warmup == 0:
            self._begin(recorder)
        self.part.update(state=RECORDING, reason="", profiler=recorder.settings)
        self.write_part()
        self._times.during.clear()
        self._recorded = 0
        self._phase = _OPEN
        self._watch = EndWatch(self.interrupt, self._options.max_seconds)
        self._watch.begin()

    def _begin(self, recorder: Recorder) -> None:
        self._first = self.count
        recorder.begin(self.count)

    def _next(self, recorder: Recorder, elapsed_ns: int) -> None:
        if not recorder.recording:
            if self.count >= self._start + self._options.warmup:
                self._begin(recorder)
            return
        self._recorded += 1
        self._times.during.append(elapsed_ns)
        if self._recorded > self._options.active:
            self._finish(COMPLETE, "", wait=self._options.exit_after_capture)
        elif self._stop_asked:
            self._finish(PARTIAL, self._stop_asked)
        elif recorder.grown_bytes() > self._options.max_mb * 1e6:
            self._finish(PARTIAL, f"the trace reached {self._options.max_mb:g} MB (--max-mb)")
        else:
            recorder.mark(self.count)

    def _postpone(self, reason: str) -> None:
        """Try again a cycle later; not where every rank is to end at the same step."""
        self.part.update(state=NOTHING, reason=reason)
        if self._options.exit_after_capture:
            self._phase = _DONE
        else:
            self._phase = _BEFORE
            while self._start <= self.count:
                self._start += self._options.cycle
            self.part["state"] = WAITING
        self.write_part()

    # Another capture, where one is asked for.

    def _asked(self, request: Request) -> None:
        self._again = request

    def _plan_again(self, request: Request) -> None:
        """Begin anew with a capture into a folder of its own; all ranks at one step where they can."""
        self._again = None
        run = self.part if self._home is None else self._home[0]
        folder = self._folder if self._home is None else self._home[1]
        self._home = (run, folder)
        self._folder = folder / request.folder
        self._start = common_step(request.at, self.count + 1) if self.count >= request.at else request.at
        everyone = replace(self._options, ranks="auto", warmup=request.warmup, active=request.active)
        self._options = replace(everyone, wait=self._start, folder=str(self._folder))
        rank = run["rank"]
        self._level = level_of(everyone, rank, run["world_size"], rank)
        self.part = {name: value for name, value in run.items() if name not in _OF_ONE_CAPTURE}
        self.part.update(state=WAITING, reason="", level=self._level, run=f"{run['run']}-{request.number}")
        self._times, self._writer, self._writing_source, self._source_at = StepTimes(), None, None, 0
        self._first = self._recorded = 0
        self._stop_asked = ""
        self._phase = _BEFORE
        self.write_part()

    # The end of a capture.

    def _finish(
        self, state: str, reason: str, *, hurried: bool = False, wait: bool = False, again: bool = False
    ) -> None:
        """Stop the profiler and write what it has; ``again`` allows another try if that is not one step."""
        recorder = self._recorder
        if recorder is None:
            return
        with self._held_back():
            self._phase, self._recorder = _CLOSING, None
            grown = recorder.grown_bytes() if recorder.recording else 0
            recorder.stop(hurried=hurried)
            self._ask(Evidence.on_window_end)
            if again and self._recorded == 0:
                self._end_watch()
                self._postpone(reason)
            elif recorder.is_empty:
                self._settle(NOTHING, f"{reason} before a step was recorded")
            else:
                self.part.update(state=WRITING, reason=reason)
                self.write_part()
                self._save(recorder, grown, state, reason)
                if wait and self._writer is not None:
                    self._writer.join(self._options.max_seconds)
            if wait and not hurried and self._phase == _CLOSING and not self._is_writing():
                self._phase = _AFTER
                self._ask(Evidence.on_written)
                self._end_watch()

    def _save(self, recorder: Recorder, grown: int, state: str, reason: str) -> None:
        target = self._folder / f"{self._stem}.json.gz"

        def made(size: int | OSError) -> None:
            if isinstance(size, OSError):
                self._settle(NOTHING, _because(reason, f"the trace could not be written: {size}"))
            else:
                self.part.update(file=target.name, bytes=size)
                self._settle(state, reason)

        try:
            size, writer = recorder.export(target, grown, self._options.max_seconds, made)
        except OSError as error:
            self._settle(NOTHING, _because(reason, f"the trace could not be saved: {error}"))
            return
        self.part["json_bytes"] = size
        self._writer = writer
        writer.start()

    # The step with stacks.

    def _plan_source(self) -> None:
        if not is_source_rank(self._options, self.part["rank"], self.part["world_size"]):
            return
        earliest = self._start + self._options.warmup + self._options.active + 1 + SAMPLED_STEPS
        self._source_at = common_step(earliest, self.count)
        if self.count == self._source_at:
            self._begin_source()

    def _begin_source(self) -> None:
        if self._foreign.one_is_open():
            return
        source = SourceStep(self._torch, self._options, self._foreign, stem=self._stem)
        try:
            self._ask(Evidence.on_source_step, False)
            source.begin(self.count)
            self._source = source
        except Exception as error:
            self._miss("source_step", error)

    def _end_source(self) -> None:
        source, self._source = self._source, None
        if source is None:
            return
        self._writing_source = source

        def written(name: str) -> None:
            self.part["source"] = name
            self.write_part()

        try:
            source.end(written)
        except Exception as error:
            self._miss("source_step", error)
        self._ask(Evidence.on_source_step, True)

    def _drop_source(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            with contextlib.suppress(Exception):
                source.drop()

    def _is_writing(self) -> bool:
        return self._writer is not None and self._writer.is_alive()

    def _settle(self, state: str, reason: str) -> None:
        self.part.update(state=state, reason=reason)
        self.write_part()

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.end()
            self._watch = None

    @contextlib.contextmanager
    def _held_back(self) -> Iterator[None]:
        watch = self._watch
        if watch is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        with watch.held_back():
            yield

    def _ask(self, question: Callable[..., dict[str, object]], *given: object) -> None:
        if self._evidence is not None:
            try:
                self.part.update(question(self._evidence, *given))
            except Exception as error:
                self._miss(question.__name__, error)

    def _miss(self, question: str, error: Exception) -> None:
        missing = self.part.setdefault("evidence_errors", {})
        missing[question] = f"{type(error).__name__}: {error}"


def _because(reason: str, trouble: str) -> str:
    return f"{reason}; {trouble}" if reason else trouble
