"""Watch the data loader of a rank: who kept it waiting, what its workers did, and what its batches hold."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tracedoc.collector.environment import affinity_of
from tracedoc.collector.probe import Plain, known, loaded, plain, probe
from tracedoc.collector.samples import KEPT_FRAMES, KEPT_STACKS, OWN_THREADS, Stack, StackTimes, in_words

FIRST_S = 0.02
PAUSE_GROWS = 1.01
"""From one sample to the next it takes this much longer: some hundred in an hour, and enough in a second."""

FIRST_WRITTEN = 8
"""After so many samples they are written, and whenever there are twice as many."""

UNBIASED_S = 0.01
SWITCH_S = 0.0001
"""Before a sample threads switch so much sooner, for a part of that time: the interpreter is else given away
only where Python code has run for 5 ms, or in calls that release it, which all samples would show."""

LONGEST_WRITE_S = 1.0
"""A worker that ends waits at most so long for what its sampler is just writing."""

DISK = "D"
"""The state of a thread that cannot be interrupted: it waits for a disk, or a file system on the network."""

_FETCH = "fetch"
"""The function that a worker's loop calls for a batch; in all others it waits, or hands the batch on."""


def watch_loop(module: Any) -> None:
    """Sample every worker that will begin; ``module`` is torch's with the loop of a worker."""
    loop = module._worker_loop

    @functools.wraps(loop)
    def sampled(*given: Any, **named: Any) -> None:
        samples = probe(WorkerSamples, loop.__code__)
        try:
            loop(*given, **named)
        finally:
            if samples is not None:
                probe(samples.end)

    module._worker_loop = sampled


class WorkerSamples:
    """The stacks of the calling thread while it makes batches; begins at once."""

    def __init__(self, loop: CodeType) -> None:
        self._loop, self._thread = loop, threading.get_ident()
        self._state = f"/proc/self/task/{threading.get_native_id()}/stat"
        self._stacks = StackTimes()
        self._seen_ns = self._made_ns = self._disk_ns = 0
        self._ended = threading.Event()
        self._sampler = threading.Thread(target=self._watch, name=f"{OWN_THREADS}worker", daemon=True)
        self._sampler.start()

    def end(self) -> None:
        """Sample no more, and leave nothing."""
        self._ended.set()
        self._sampler.join(LONGEST_WRITE_S)  # or it would write after what is written was removed
        forget_workers([os.getpid()])

    def _watch(self) -> None:
        pause_s, taken, write_at = FIRST_S, 0, FIRST_WRITTEN
        last = time.perf_counter_ns()
        while not self._ended.wait(pause_s):
            state, stack = self._sample()
            now = time.perf_counter_ns()
            self._stacks.add(stack, now - last)
            self._seen_ns += now - last
            self._made_ns += (now - last) if stack else 0
            self._disk_ns += (now - last) if stack and state == DISK else 0
            last, pause_s, taken = now, pause_s * PAUSE_GROWS, taken + 1
            if taken == write_at:
                write_at *= 2
                probe(self._write)

    def _sample(self) -> tuple[str, Stack]:
        """The state of the thread, as Linux names it, and its work, at some time in the next 10 ms."""
        usual = sys.getswitchinterval()
        sys.setswitchinterval(min(SWITCH_S, usual))
        try:
            # When a thread gave the interpreter away is not by chance; so much later is.
            time.sleep(UNBIASED_S * (time.perf_counter_ns() % 1009) / 1009)
            state = probe(state_of, self._state) or ""
            return state, work_of(sys._current_frames().get(self._thread), self._loop)
        finally:
            sys.setswitchinterval(usual)

    def _write(self) -> None:
        found = {
            "stacks": in_words(self._stacks.most()),
            "seen_ms": self._seen_ns / 1e6,
            "made_ms": self._made_ns / 1e6,
            "disk_ms": self._disk_ns / 1e6,
        }
        path, words = _path(os.getpid()), json.dumps(found)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        with open(os.open(f"{path}.new", flags, 0o600), "w", encoding="utf-8") as file:
            file.write(words)
        os.replace(f"{path}.new", path)


def work_of(frame: FrameType | None, loop: CodeType) -> Stack:
    """The frames of a worker that makes a batch, from the innermost outwards to its loop; else none."""
    found: list[tuple[CodeType, int]] = []
    while frame is not None and frame.f_code is not loop:
        found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    makes = frame is not None and bool(found) and found[-1][0].co_name == _FETCH
    return tuple(found[:KEPT_FRAMES]) if makes else ()


def state_of(path: str) -> str:
    """The letter of a thread's state, by its ``stat`` under ``/proc``."""
    with open(path, encoding="ascii", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[0]


def read_workers(pids: Iterable[int]) -> Plain:
    """What workers of this host did so far: their ``stacks``, those with most ms together first.

    In ``made_ms`` they made batches, and in ``disk_ms`` of these they waited for a disk, or a file system on
    the network; ``made_frac`` is the share of its time for which the busiest one made some.
    """
    stacks: dict[tuple[str, ...], float] = defaultdict(float)
    made_ms = disk_ms = 0.0
    made_frac: float | None = None
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            with open(_path(pid), encoding="utf-8") as file:
                found = json.load(file)
            of_one_ms = float(found["made_ms"])
            made_ms, disk_ms = made_ms + of_one_ms, disk_ms + float(found["disk_ms"])
            made_frac = max(made_frac or 0.0, of_one_ms / float(found["seen_ms"]))
            for one in found["stacks"]:
                stacks[tuple(one["frames"])] += float(one["ms"])
    most = sorted(stacks, key=lambda frames: -stacks[frames])[:KEPT_STACKS]
    return {
        "stacks": [{"ms": stacks[frames], "frames": list(frames)} for frames in most],
        "made_ms": made_ms,
        "disk_ms": disk_ms,
        "made_frac": made_frac,
    }


def forget_workers(pids: Iterable[int]) -> None:
    """Remove what workers have written."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.unlink(_path(pid))


def _path(pid: int) -> str:
    return os.path.join(tempfile.gettempdir(), f".tracedoc-worker.{os.getuid()}.{pid}")


MAX_TENSORS = 32
BATCH_DEPTH = 4
MAX_WORKERS = 64
MAX_COUNTED = 64
"""Of so many batches of a window the tokens are counted at most."""

MAX_ELEMENTS = 1 << 22
"""A mask with more elements is not added up: it would take longer than a millisecond."""

_PROCESSES = Path("/proc")


class LoaderWatch:
    """Times every batch that a DataLoader of this process hands out, at some microseconds for each.

    It counts who was waited for; from :meth:`open` to :meth:`close` also what the kernel counts for workers,
    and what batches hold.
    """

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._workers: list[Any] = []
        self._waits: Counter[int] = Counter()
        self._started: dict[int, dict[str, int]] = {}
        self._since = 0
        self._batches = 0
        self.tensors: list[Plain] = []
        self._tokens: list[tuple[int, int]] = []
        self._made = self._made_ns = self._chosen_ns = 0

    def begin(self) -> None:
        """Watch from now on; without a DataLoader in use nothing happens."""
        home = loaded("torch.utils.data.dataloader")
        iterator, loader = getattr(home, "_BaseDataLoaderIter", None), getattr(home, "DataLoader", None)
        if iterator is None or loader is None:
            return
        usual, choose, make = iterator.__next__, iterator._next_index, loader._get_iterator

        def watched(self: Any) -> Any:
            began, worker = time.perf_counter_ns(), awaited(self)
            batch = usual(self)
            watch.took(self, worker, time.perf_counter_ns() - began, batch)
            return batch

        def watched_choice(self: Any) -> Any:
            began = time.perf_counter_ns()
            found = choose(self)
            watch._chosen_ns += time.perf_counter_ns() - began
            return found

        def watched_start(self: Any) -> Any:
            began = time.perf_counter_ns()
            made = make(self)
            watch._made += 1
            watch._made_ns += time.perf_counter_ns() - began
            return made

        watch = self
        iterator.__next__, iterator._next_index = watched, watched_choice
        loader._get_iterator = watched_start

    def took(self, iterator: Any, worker: int, ns: int, batch: Any) -> None:
        """Note a batch for which the training waited so long, for this worker, or -1 for itself."""
        if os.getpid() != self._owner:
            return
        if not self.tensors:
            self.tensors = probe(describe_batch, batch) or []
        self._workers = getattr(iterator, "_workers", [])
        self._batches += 1
        self._waits[worker] += ns
        if self._since and len(self._tokens) < MAX_COUNTED and (found := probe(count_tokens, batch)):
            self._tokens.append(found)

    def open(self) -> None:
        """Begin to count, for a window that begins."""
        self._tokens.clear()
        self._since = time.perf_counter_ns()
        self._started = self._read()

    def close(self) -> Plain:
        """What the loader did since :meth:`open`.

        ``tokens`` are pairs of real ones and of places in each batch. Of each worker that lived through the
        window ``ran_us``, ``waited_us`` for a core, and bytes; ``fresh`` came in it. ``stacks`` are those
        of workers since they began: they made batches for ``made_ms``, of it ``disk_ms`` waiting for a disk,
        the busiest for a share of ``made_frac``.
        """
        wall, self._since = time.perf_counter_ns() - self._since, 0
        now = self._read()
        workers = [
            {name: now[one][name] - value for name, value in self._started[one].items() if name in now[one]}
            for one in self._started
            if one in now
        ]
        cpus = {probe(affinity_of, one) for one in now} - {None}
        return known(
            wall_us=wall // 1000,
            workers=workers,
            fresh=len(now.keys() - self._started.keys()) or None,
            cpus=sorted(cpus)[:4],
            **(read_workers(now) if now else {}),
            tokens=[list(pair) for pair in self._tokens],
        )

    def so_far(self) -> Plain | None:
        """The ``batches`` since the first step, and how long training waited for each worker.

        For ``index_ms`` a sampler chose what comes next, which this process does for its workers too.
        ``starts`` is how often an iterator was made, as for an epoch, in ``starts_ms`` together.
        """
        waits = {str(worker): ns / 1e6 for worker, ns in sorted(self._waits.items())[:MAX_WORKERS]}
        made = known(starts=self._made or None, starts_ms=self._made_ns / 1e6)
        chosen = {"index_ms": self._chosen_ns / 1e6}
        return {"batches": self._batches, "waits_ms": waits, **chosen, **made} if self._batches else None

    def end(self) -> None:
        """Remove what workers have written that were ended before they could."""
        forget_workers(self._pids())

    def _pids(self) -> list[int]:
        return [pid for one in self._workers[:MAX_WORKERS] if isinstance(pid := getattr(one, "pid", 0), int)]

    def _read(self) -> dict[int, dict[str, int]]:
        return {pid: found for pid in self._pids() if (found := read_worker(pid))}


def awaited(iterator: Any) -> int:
    """The worker that makes the next batch of an iterator, -1 where it has none or the batch is there."""
    tasks = getattr(iterator, "_task_info", None)
    if tasks is None:
        return -1
    task = tasks.get(iterator._rcvd_idx)
    return int(task[0]) if task else -1


def read_worker(pid: int) -> dict[str, int]:
    """What the kernel counts for a process: us it ran and waited for cores, and bytes."""
    found: dict[str, int] = {}
    folder = _PROCESSES / str(pid)
    if times := probe((folder / "schedstat").read_text):
        ran, waited, _ = times.split()
        found |= {"ran_us": int(ran) // 1000, "waited_us": int(waited) // 1000}
    if words := probe((folder / "io").read_text):
        for line in words.splitlines():
            name, _, value = line.partition(":")
            if name in ("rchar", "read_bytes"):
                found[name] = int(value)
    return found


# -- what a batch holds


def describe_batch(batch: Any) -> list[Plain]:
    """Return name, shape and dtype of each tensor in a batch: nested lists and dicts are looked into."""
    found = []
    for name, tensor in _tensors(batch, "", 0):
        found.append(
            known(
                name=name,
                shape=[int(length) for length in tensor.shape],
                dtype=plain(tensor.dtype),
                device=plain(tensor.device),
                pinned=probe(tensor.is_pinned) or None,
            )
        )
        if len(found) == MAX_TENSORS:
            break
    return found


# Masks of padding mark one or the other, those of losses something else.
_MASK = re.compile(r"(?:^|[._])(?:attention|attn|input)_mask$")
_LENGTHS = re.compile(r"(?:^|[._])(?:\w+_)?len(?:gth)?s$")
_BOUNDS = re.compile(r"(?:^|[._])cu_?seq_?lens\w*$")


def count_tokens(batch: Any) -> tuple[int, int] | None:
    """The real tokens of a batch, and the places that it has for them; ``None`` where neither is told.

    By a mask of two dimensions, else by bounds or lengths beside the ids. Only tensors on the host are added
    up, and none is kept.
    """
    ids, real = 0, 0
    for name, tensor in _tensors(batch, "", 0):
        if tensor.device.type != "cpu" or tensor.is_floating_point() or tensor.numel() > MAX_ELEMENTS:
            continue
        if _MASK.search(name) and tensor.dim() == 2:
            # Threads of torch's own sum would disturb the step that is recorded.
            return int(loaded("numpy").count_nonzero(tensor.numpy())), tensor.numel()
        if _BOUNDS.search(name) and tensor.dim() == 1:
            real = real or int(tensor[-1])
        elif _LENGTHS.search(name) and tensor.dim() == 1:
            real = real or int(tensor.sum())
        elif tensor.dim() == 2 or (tensor.dim() == 1 and not ids):
            ids = max(ids, tensor.numel())
    return (real, ids) if 0 < real <= ids else None


def _tensors(value: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    torch = loaded("torch")
    if isinstance(value, torch.Tensor):
        yield name, value
    elif depth < BATCH_DEPTH and isinstance(value, Mapping):
        for key in list(value)[:MAX_TENSORS]:
            yield from _tensors(value[key], f"{name}.{key}"[:80].lstrip("."), depth + 1)
    elif depth < BATCH_DEPTH and isinstance(value, list | tuple):
        for number, item in enumerate(value[:MAX_TENSORS]):
            yield from _tensors(item, f"{name}.{number}"[:80].lstrip("."), depth + 1)
