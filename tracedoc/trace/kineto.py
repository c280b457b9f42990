"""Read one Kineto trace into columns."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable
from contextlib import closing, nullcontext
from typing import Any, BinaryIO

from tracedoc.errors import InputError, TraceLimit
from tracedoc.trace.assemble import Columns
from tracedoc.trace.chunks import NotJson, Outcome, cut
from tracedoc.trace.columns import Trace
from tracedoc.trace.events import Frames
from tracedoc.trace.part import Tables, category_text
from tracedoc.trace.reader import PythonReader, make_reader
from tracedoc.trace.source import Source, open_stream
from tracedoc.trace.vocabulary import KINDS

_DAMAGE = ("truncated-trace", "damaged-events", "impossible-times")


def read_trace(
    path: str | os.PathLike[str],
    *,
    stream: BinaryIO | None = None,
    python_functions: bool = False,
    long_frames: bool = False,
    strict: bool = False,
    on_bytes: Callable[[int], None] | None = None,
    max_bytes: int | None = None,
) -> Trace:
    """Return the trace in a file; ``-`` is standard input, ``stream`` is read instead of ``path``.

    Damage is skipped and a truncated file is read up to its last whole event; both are limits of the
    trace, and with ``strict`` errors. ``on_bytes`` is called with the stored bytes read so far. ``max_bytes``
    bounds the decompressed text; by default only a gzip file that inflates implausibly is refused.
    ``python_functions`` keeps the Python frames of a capture with stacks, ``long_frames`` only those
    of 10 us and more that tell whose code runs. Raises :class:`InputError` where the file is no Kineto
    trace, saying what it is.
    """
    name = os.fspath(path)
    opened = nullcontext(stream) if stream is not None else _closing(name)
    collecting = gc.isenabled()
    # Millions of small objects live for one chunk each; the cyclic collector would walk them in vain.
    gc.disable()
    try:
        with opened as file:
            source = Source(name, file, on_bytes, max_bytes)
            tables = Tables()
            frames = Frames.ALL if python_functions else Frames.LONG if long_frames else Frames.NONE
            reader = make_reader(tables, frames)
            return _read(source, reader, Columns(tables), strict=strict)
    finally:
        if collecting:
            gc.enable()


def _closing(name: str) -> Any:
    file = open_stream(name)
    return nullcontext(file) if name == "-" else closing(file)


def _read(source: Source, reader: PythonReader, columns: Columns, *, strict: bool) -> Trace:
    def decode_chunk(buffer: bytearray, begin: int, end: int) -> None:
        columns.append(reader.chunk(buffer, begin, end))

    def decode_one(text: bytes) -> bool:
        part = reader.single(text)
        if part is not None:
            columns.append(part)
        return part is not None

    try:
        outcome = cut(source, decode_chunk, decode_one, stop_at=frozenset({"nodes"}))
    except NotJson as problem:
        raise _not_json(source, problem.head) from None
    outcome.truncated = outcome.truncated or source.damaged
    _check_it_is_a_trace(source.path, outcome, columns, reader.read - columns.descriptions)
    limits = _damage_limits(source.path, outcome, reader.read)
    trace = columns.trace(source.path, outcome, reader, limits)
    lost = [limit for limit in trace.limits if limit.code in _DAMAGE]
    if strict and lost:
        raise InputError(lost[0].message, "without the strict mode, what is whole in it is read")
    return trace


# What is wrong with a file, in the user's words.


_OTHER_TEXTS = (
    (b"version https://git-lfs", "a Git LFS pointer, not the trace itself", "fetch the file: git lfs pull"),
    (b"\xff\xfe", "UTF-16 text", "convert it: iconv -f UTF-16 -t UTF-8"),
    (b"\xfe\xff", "UTF-16 text", "convert it: iconv -f UTF-16 -t UTF-8"),
    (b"\x1f\x8b", "gzipped twice", "unpack it once: gunzip"),
    (b"<", "an HTML or XML page, not a trace", "download the raw file, not its page"),
    (
        b"\x80",
        "a pickle, and no dump of the flight recorder, which holds plain values only",
        "nothing in it was run; pass the dump as PyTorch wrote it, or a trace",
    ),
    (b"", "not JSON", "pass a trace that torch.profiler exported (.json or .json.gz)"),
)
"""How files begin that are no JSON, what they are, and what helps."""


def _not_json(source: Source, head: bytes) -> InputError:
    path = source.path
    if not head and source.damaged:
        return InputError(f"{path} is a gzip file that is cut off before its first event", "copy it again")
    if not head:
        return InputError(
            f"{path} is empty", "the job may have ended before it could export; record it again"
        )
    what, advice = next((what, advice) for begin, what, advice in _OTHER_TEXTS if head.startswith(begin))
    return InputError(f"{path} is {what}", advice)


_OTHER_WRITERS = (
    (
        re.compile(r"(?:CPU|CUDA) functions$"),
        "the legacy torch.autograd profiler",
        "record with torch.profiler.profile(activities=[CPU, CUDA]): the old one links no kernels",
    ),
    (
        re.compile(r"/(?:device|host):|/job:"),
        "the profiler of JAX or TensorFlow",
        "open it with XProf (pip install xprof; xprof --logdir DIR), or in ui.perfetto.dev",
    ),
)
"""Patterns of the processes in files of other writers, who that is, and what helps."""


def _check_it_is_a_trace(path: str, outcome: Outcome, columns: Columns, events: int) -> None:
    if "nodes" in outcome.metadata or ("schema" in outcome.metadata and not outcome.has_events):
        raise InputError(
            f"{path} is a PyTorch execution trace, not a Kineto trace",
            "pass the file that torch.profiler's export_chrome_trace wrote",
        )
    if "tracedocView" in outcome.metadata:
        raise InputError(
            f"{path} was written by tracedoc for Perfetto, and is no trace of a job",
            "diagnose the run that it was written for",
        )
    record = "pass a trace that torch.profiler exported (export_chrome_trace or tensorboard_trace_handler)"
    if not outcome.has_events:
        if outcome.truncated:
            raise InputError(f"{path} is cut off before its first event", "copy it again, or record it again")
        raise InputError(f"{path} is JSON, but has no traceEvents", record)
    if not columns.categories:
        if outcome.truncated:
            raise InputError(f"{path} is cut off before its first whole event", "copy or record it again")
        if outcome.skipped or outcome.gave_up_at is not None:
            raise InputError(f"{path} holds no event that is whole", "copy it again, or record it again")
        if events:
            raise InputError(
                f"{path} is not of PyTorch's profiler: none of its {events:,} events is complete (phase X)",
                "a file of begin and end events (b and e, B and E) is another tool's: Perfetto shows it; "
                + record,
            )
        raise InputError(f"{path} holds no events", "the profiler was never active; check its schedule")
    if not any(category_text(category) in KINDS for category in columns.categories):
        for pattern, writer, advice in _OTHER_WRITERS:
            if any(pattern.match(one) for one in columns.processes):
                raise InputError(f"{path} was written by {writer}, not by torch.profiler", advice)
        seen = ", ".join(sorted(category_text(category) for category in columns.categories)[:3])
        raise InputError(
            f"{path} is a Chrome trace, but not one of PyTorch's profiler "
            f"({f'its categories: {seen}' if seen else 'no complete event has a category'})",
            record,
        )


def _damage_limits(path: str, outcome: Outcome, events: int) -> list[TraceLimit]:
    places = "place" if outcome.skipped == 1 else "places"
    found = (
        (
            outcome.skipped,
            f"what is not valid JSON was skipped in {outcome.skipped:,} {places}, the first at byte "
            f"{outcome.first_skipped or 0:,}; {events:,} whole events were read",
            "what they recorded is missing",
        ),
        (
            outcome.gave_up_at is not None,
            f"a long stretch holds no event; nothing was read behind byte {outcome.gave_up_at or 0:,}",
            "what stands at the end of the file is unknown",
        ),
        (
            outcome.second_at is not None,
            f"another JSON text begins at byte {outcome.second_at or 0:,}, and was not read",
            "what it recorded is missing",
        ),
    )
    limits = [TraceLimit("damaged-events", path, what, effect) for is_so, what, effect in found if is_so]
    if outcome.truncated:
        what = (
            f"{path} ends in the middle of an event or of its metadata (byte {outcome.raw_bytes:,}); "
            f"{events:,} whole events were read"
        )
        effect = "the last step is incomplete, and what stands at the end of the file is unknown"
        limits.insert(0, TraceLimit("truncated-trace", "", what, effect))
    return limits
