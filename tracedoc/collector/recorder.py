"""Sessions of torch's profiler: those of the job, to which ours give way, the captured steps, and one more.

Two profiler sessions at a time end badly: the second silently takes over, and exporting the emptied first
one crashes the process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from tracedoc.collector.options import Options, listed_ranks


class ForeignProfilers:
    """The profiler sessions that are not ours: whether one is open, and a call before one opens."""

    def __init__(self, torch: ModuleType, before_one_opens: Callable[[], None]) -> None:
        self.seen = 0
        self.active = False
        self._torch = torch
        self._open: weakref.WeakSet[Any] = weakref.WeakSet()
        self._before_one_opens = before_one_opens
        self._own_thread = 0

    @contextlib.contextmanager
    def ours(self) -> Iterator[None]:
        """Mark what this thread does to a profiler as our own doing."""
        before, self._own_thread = self._own_thread, threading.get_ident()
        try:
            yield
        finally:
            self._own_thread = before

    def one_is_open(self) -> bool:
        """True if a profiler of the job is armed or records; asked while ours does neither."""
        autograd = self._torch.autograd
        return bool(self._open) or autograd.profiler._is_profiler_enabled or autograd._profiler_enabled()

    def watch(self) -> None:
        """Wrap the two points that every profiler session of torch goes through, and its end."""
        profiler = self._torch.autograd.profiler
        prepare, leave = profiler.profile._prepare_trace, profiler.profile.__exit__
        start = profiler._run_on_profiler_start

        def _prepare_trace(session: Any) -> Any:
            self._opens(session)
            return prepare(session)

        def __exit__(session: Any, *exception: Any) -> Any:  # noqa: N807
            try:
                return leave(session, *exception)
            finally:
                self._open.discard(session)
                self.active = bool(self._open)

        def _run_on_profiler_start() -> Any:
            # emit_nvtx and emit_itt have no _prepare_trace.
            self._opens(None)
            return start()

        profiler.profile._prepare_trace = _prepare_trace
        profiler.profile.__exit__ = __exit__
        profiler._run_on_profiler_start = _run_on_profiler_start

    def _opens(self, session: Any) -> None:
        if self._own_thread == threading.get_ident():
            return
        if session is not None:
            self.seen += 1
            self._open.add(session)
            self.active = True
        self._before_one_opens()


_LEAST_FREE_DEVICE_FRAC = 0.10
"""With less device memory free, shapes are not recorded: the profiler would hold on to tensors for them."""

HOST_ONLY = "host"
"""The level of a session that watches no device."""

SOURCE_SUFFIX = ".source.gz"
"""Not the name of a trace, for it is none of the run's."""

MOST_SOURCE_RANKS = 8
"""So many ranks record a step with stacks at most: each writes a file of its own."""

_FIRST_TRIES = 4
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class Recorder:
    """A profiler session of ours.

    Not :class:`torch.profiler.profile` with a schedule: its bookkeeping would run at every step of the job.
    ``settings`` is what the manifest says was recorded; ``any_thread`` is whether a thread other than the one
    that trains can stop it with its data.
    """

    def __init__(self, torch: ModuleType, options: Options, level: str, foreign: ForeignProfilers) -> None:
        self._torch, self._foreign = torch, foreign
        device = _device(torch) if level != HOST_ONLY else ""
        light = level == "light" and device != ""
        shapes = options.record_shapes and not light and not _device_is_nearly_full(torch, device)
        stack = options.with_stack and not light
        memory = options.profile_memory and not light
        experimental, self.any_thread = _experimental(torch, stack=stack)
        profiler = torch.profiler
        activities = set() if light else {profiler.ProfilerActivity.CPU}
        if device:
            activities.add(getattr(profiler.ProfilerActivity, device.upper()))
            _set_teardown(torch)
        self._profile = profiler._KinetoProfile(
            activities=activities,
            record_shapes=shapes,
            with_stack=stack,
            profile_memory=memory,
            experimental_config=experimental,
        )
        self._range: Any = None
        self._rss = 0
        self.recording = False
        self.settings: dict[str, object] = {
            "device": device or "cpu",
            "record_shapes": shapes,
            "with_stack": stack,
            "profile_memory": memory,
        }

    def arm(self) -> None:
        """Prepare the session, so that starting it later costs little."""
        with self._foreign.ours():
            self._profile.prepare_trace()

    def begin(self, step: int) -> None:
        """Start to record, with this step."""
        self._rss = _resident_bytes()
        with self._foreign.ours():
            self._profile.start_trace()
        self.recording = True
        self._open_range(step)

    def mark(self, step: int) -> None:
        """End the range of the step before, and begin this one's."""
        self._close_range()
        self._open_range(step)

    def grown_bytes(self) -> int:
        """The bytes that the process grew since recording began: about the size of the trace as JSON."""
        return max(0, _resident_bytes() - self._rss)

    def stop(self, *, hurried: bool = False) -> None:
        """Stop recording; ``hurried`` neither waits for a device that may hang, nor ends a step's range."""
        if not hurried:
            self._close_range()
        with self._foreign.ours():
            if not self.recording:
                # Armed only: the way out of that state leads through an empty session.
                self._profile.start_trace()
            if hurried and self._profile.profiler is not None:
                self._profile.profiler.use_device = None
            self._profile.stop_trace()

    @property
    def is_empty(self) -> bool:
        """Whether the stopped session holds nothing; exporting it then would crash the process."""
        results = getattr(self._profile.profiler, "kineto_results", None)
        return not self.recording or results is None or results.trace_start_ns() == 0

    def save(self, path: Path) -> None:
        """Write the trace as JSON; raises ``OSError`` where it did not get there whole."""
        try:
            self._profile.export_chrome_trace(str(path))
        except RuntimeError as error:
            raise OSError(str(error)) from error
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 64))
            # Kineto writes through a stream that does not complain about a full disk.
            if not file.read().rstrip().endswith(b"}"):
                raise OSError(f"{path} was cut off at {size} bytes")

    def export(
        self, target: Path, grown: int, seconds: float, made: Callable[[int | OSError], None]
    ) -> tuple[int, threading.Thread]:
        """Save the trace on the node's disk; its bytes, and the thread, not begun, that compresses it.

        ``grown`` is about how many bytes it takes. ``made`` gets the size of ``target``, or what kept it from
        being written within ``seconds``. Raises ``OSError`` where the trace cannot be saved.
        """
        raw = local_path(target.name, 2 * grown, target.parent)
        try:
            self.save(raw)
            size = raw.stat().st_size
        except OSError:
            with contextlib.suppress(OSError):
                raw.unlink()
            raise
        deadline = time.monotonic() + seconds

        def write() -> None:
            try:
                packed = compress(raw, target, deadline)
            except OSError as error:
                made(error)
            else:
                made(packed)

        return size, threading.Thread(target=write, name=f"tracedoc-{target.name}", daemon=True)

    def _open_range(self, step: int) -> None:
        self._range = self._torch.profiler.record_function(f"ProfilerStep#{step}")
        self._range.__enter__()

    def _close_range(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None


def _device(torch: ModuleType) -> str:
    """Return the kind of accelerator that the profiler can watch here, "" for none.

    A device that the job has not used yet is not initialised for a trace.
    """
    for name in ("cuda", "xpu", "mtia"):
        module = getattr(torch, name, None)
        activity = getattr(torch.profiler.ProfilerActivity, name.upper(), None)
        if module is None or activity is None or activity not in torch.profiler.supported_activities():
            continue
        if module.is_available() and getattr(module, "is_initialized", lambda: True)():
            return name
    return ""


def _device_is_nearly_full(torch: ModuleType, device: str) -> bool:
    if device != "cuda":
        return False
    free, total = torch.cuda.mem_get_info()
    return bool(free < _LEAST_FREE_DEVICE_FRAC * total)


def _experimental(torch: ModuleType, *, stack: bool) -> tuple[Any, bool]:
    """Return the experimental settings that this torch knows, and whether all threads are profiled."""
    wanted = {"profile_all_threads": True, "enable_cuda_sync_events": True, "trace_only": not stack}
    while True:
        try:
            config = torch._C._profiler._ExperimentalConfig(**wanted)
        except TypeError:
            # Older versions know fewer of them; the newest goes first.
            wanted.popitem()
            if not wanted:
                return None, False
        else:
            return config, "profile_all_threads" in wanted


def _set_teardown(torch: ModuleType) -> None:
    """Have CUPTI removed after profiling, or the job stays slower.

    CUDA graphs do not survive that before CUDA 12.6.
    """
    if torch.version.cuda is None:
        return
    version = tuple(int(part) for part in torch.version.cuda.split(".")[:2])
    if version >= (12, 6) or not _uses_cuda_graphs(torch):
        os.environ.setdefault("TEARDOWN_CUPTI", "1")


def _uses_cuda_graphs(torch: ModuleType) -> bool:
    import gc

    inductor = sys.modules.get("torch._inductor.config")
    if inductor is not None and inductor.triton.cudagraphs:
        return True
    # Not isinstance: it asks proxies for the class of what they stand for, which may be gone.
    return any(issubclass(type(thing), torch.cuda.CUDAGraph) for thing in gc.get_objects())


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0


_COMPRESSED_BYTES = 1 << 20
_SPARE_BYTES = 64 << 20
_GZIP = 31  # zlib's way to ask for a gzip header


def local_path(name: str, needed_bytes: int, folder: Path) -> Path:
    """The path to save a trace to first: on the node's own disk, or in ``folder`` where that has no room.

    Raises ``OSError`` if neither has room for ``needed_bytes`` and some more.
    """
    for directory in (Path(tempfile.gettempdir()), folder):
        with contextlib.suppress(OSError):
            if shutil.disk_usage(directory).free > needed_bytes + _SPARE_BYTES:
                return directory / f".{name}.{os.getpid()}.json"
    raise OSError(f"no room for a trace of about {needed_bytes >> 20} MB")


def compress(source: Path, target: Path, deadline_s: float) -> int:
    """Write ``source`` as gzip to ``target`` by way of ``<target>.part``; return the size of the result.

    The source is removed, whatever happens. Raises ``OSError`` where there is no room, and ``TimeoutError``
    if ``time.monotonic`` passes ``deadline_s`` first.
    """
    part = target.with_name(f"{target.name}.part")
    try:
        with source.open("rb") as raw, part.open("wb") as packed:
            deflater = zlib.compressobj(5, zlib.DEFLATED, _GZIP)
            while chunk := raw.read(_COMPRESSED_BYTES):
                packed.write(deflater.compress(chunk))
                if time.monotonic() > deadline_s:
                    raise TimeoutError("writing the trace took too long")
            packed.write(deflater.flush())
            packed.flush()
            os.fsync(packed.fileno())
        os.replace(part, target)
        return target.stat().st_size
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    finally:
        with contextlib.suppress(OSError):
            source.unlink()


def is_source_rank(options: Options, rank: int, world_size: int) -> bool:
    """True if a rank is among those that record a step with stacks.

    All are, up to :data:`MOST_SOURCE_RANKS`. Beyond, it is every second, fourth, eighth one and so on, so
    that the first rank of a node is among them wherever there is room: nodes mostly have 2, 4, 8 or 16. Of
    ranks that were asked for (``--ranks``) the same holds, in their order.
    """
    chosen = listed_ranks(options.ranks)
    among = range(world_size) if chosen is None else sorted(one for one in chosen if one < world_size)
    every = 1
    while len(among) > every * MOST_SOURCE_RANKS:
        every *= 2
    return options.source_step and not options.with_stack and rank in among[::every]


def common_step(earliest: int, ready: int) -> int:
    """Return the number of the step to record, for a rank that is ready at the end of step ``ready``.

    ``earliest`` is when a rank is ready whose trace was written at once. Others are later, each by another
    number of steps, so they may begin 0, 4, 8, 16, ... steps from there.
    """
    later = ready - earliest
    return earliest + (max(_FIRST_TRIES, 1 << (later - 1).bit_length()) if later > 0 else 0)


class SourceStep:
    """The extra step of a rank, with Python stacks: it shows where in the script the host spends time.

    Begun at the end of a step, ended at the end of the next. Stacks slow a step, so it is none of the
    captured ones, and comes last, when all steps are timed. Only the host is recorded: no device has to be
    watched a second time. The ranks wait for each other, so they record the same step where they can: one
    slow step costs what one of them would cost alone.
    """

    def __init__(self, torch: ModuleType, options: Options, foreign: ForeignProfilers, *, stem: str) -> None:
        wanted = replace(options, with_stack=True, record_shapes=False, profile_memory=False)
        self._recorder = Recorder(torch, wanted, HOST_ONLY, foreign)
        self._options, self._stem = options, stem
        self._writer: threading.Thread | None = None

    def begin(self, number: int) -> None:
        """Record from now on; ``number`` is that of the step."""
        self._recorder.arm()
        self._recorder.begin(number)

    def drop(self) -> None:
        """Stop, and keep nothing."""
        self._recorder.stop(hurried=True)

    def end(self, written: Callable[[str], None]) -> None:
        """Stop, and write the file; another thread calls ``written`` with its name when it is complete."""
        grown = self._recorder.grown_bytes()
        self._recorder.stop()
        if self._recorder.is_empty or grown > self._options.max_mb * 1e6:
            return
        target = Path(self._options.folder) / (self._stem + SOURCE_SUFFIX)

        def made(size: int | OSError) -> None:
            if not isinstance(size, OSError):
                written(target.name)

        _, self._writer = self._recorder.export(target, grown, self._options.max_seconds, made)
        self._writer.start()

    @property
    def is_writing(self) -> bool:
        """Whether the file is not complete yet."""
        return self._writer is not None and self._writer.is_alive()

    def wait(self) -> None:
        """Wait until the file is written, for as long as writing may take."""
        if self._writer is not None:
            self._writer.join(self._options.max_seconds)
