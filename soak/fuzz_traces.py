"""Diagnose mutants of real and simulated traces, whole and in this process: no traceback, hang or warning.

    python soak/fuzz_traces.py [--count 20000] [--from 0] [--keep DIR]

Mutant N of a seed is always the same; ``--keep DIR --from N --count 1`` writes it down.
"""

from __future__ import annotations

import argparse
import gzip
import json
import marshal
import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from seeds import Json, Seed, seeds
from trial import repeat

import tracedoc
from tracedoc.diagnosis_json import from_json, to_json
from tracedoc.errors import TracedocError
from tracedoc.judge.load import load_rules
from tracedoc.pipeline import Options, judge, measure
from tracedoc.report.render import render
from tracedoc.values import Failed
from tracedoc.whatif.answer import what_if

ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2,
        7,
        0.5,
        -0.5,
        1e308,
        -1e308,
        1e-308,
        2**31,
        2**53,
        2**62,
        2**63,
        -(2**63),
    ),
    *(2**64, 10**30, "", "x", "0", "-1", "1e999", "NaN", "\ud800", "\0", "[0, 1]", "[]", "[1000000]", "{}"),
    *([], [0], [0, 1], [[]], [-1, 2**40], {}, {"a": {}}, "x" * 5000, float("nan"), float("inf")),
)
"""Values that a field may get."""

NAMES = (
    *(
        "ProfilerStep#0",
        "ProfilerStep#1",
        "ProfilerStep#-1",
        "ProfilerStep#99999999999999999999",
        "ProfilerStep#",
    ),
    *("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "nccl:all_reduce"),
    *(
        "nccl:_all_gather_base",
        "nccl:_reduce_scatter_base",
        "nccl:send 0->1",
        "nccl:recv 0<-1",
        "gloo:all_reduce",
    ),
    *(
        "FSDP::all_gather",
        "FSDP::pre_forward (0)",
        "FSDP::post_backward_reduce",
        "record_param_comms",
        "c10d::",
    ),
    *("Optimizer.step#AdamW.step", "Optimizer.zero_grad#SGD.zero_grad", "DistributedDataParallel.forward"),
    *(
        "cudaLaunchKernel",
        "cudaDeviceSynchronize",
        "cudaMemcpyAsync",
        "Memcpy HtoD (Pageable -> Device)",
        "Memset",
    ),
    *(
        "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
        "aten::mm",
        "autograd::engine::evaluate_function",
    ),
    *(
        "Context Sync",
        "Stream Wait Event",
        "[memory]",
        "gc.collect",
        "## Call CompiledFxGraph f ##",
        "hipLaunchKernel",
    ),
)
CATEGORIES = (
    *(
        "kernel",
        "gpu_memcpy",
        "gpu_memset",
        "cuda_runtime",
        "cuda_driver",
        "cpu_op",
        "user_annotation",
        "ac2g",
    ),
    *(
        "gpu_user_annotation",
        "python_function",
        "overhead",
        "cpu_instant_event",
        "cuda_sync",
        "collective_comm",
        "",
    ),
)
PHASES = ("X", "B", "E", "i", "M", "s", "f", "C", "b", "e", "", "XX")

Mutation = Callable[[random.Random, Json], None]


def _copy(document: Json) -> Json:
    copied: Json = marshal.loads(marshal.dumps(document))
    return copied


def _events(document: Json) -> list[Json]:
    found = document.get("traceEvents")
    return [event for event in found if isinstance(event, dict)] if isinstance(found, list) else []


def _some(dice: random.Random, document: Json) -> list[Json]:
    """Return one event, some, or all of a category."""
    events = _events(document)
    if not events:
        return []
    kind = dice.random()
    if kind < 0.4:
        return [dice.choice(events)]
    if kind < 0.7:
        return dice.sample(events, dice.randint(1, len(events)))
    cat = dice.choice(events).get("cat")
    return [event for event in events if event.get("cat") == cat]


def odd(dice: random.Random) -> Any:
    """Return an odd value, a copy: a later change may go into it."""
    return deepcopy(dice.choice(ODD))


def _change_field(dice: random.Random, document: Json) -> None:
    for event in _some(dice, document):
        place = event["args"] if isinstance(event.get("args"), dict) and dice.random() < 0.5 else event
        if place:
            place[dice.choice(list(place))] = odd(dice)


def _remove_field(dice: random.Random, document: Json) -> None:
    for event in _some(dice, document):
        place = event["args"] if isinstance(event.get("args"), dict) and dice.random() < 0.5 else event
        if place:
            place.pop(dice.choice(list(place)))


def _swap_fields(dice: random.Random, document: Json) -> None:
    for event in _some(dice, document):
        a, b = dice.choice(list(event) or ["ts"]), dice.choice(["ts", "dur", "tid", "pid", "args", "cat"])
        event[a], event[b] = event.get(b), event.get(a)


def _same_value(dice: random.Random, document: Json) -> None:
    """Give all of some events one value: one thread, one beginning, one id."""
    some = _some(dice, document)
    fields = {key for event in some for key in event} - {"args"}
    if fields:
        key = dice.choice(sorted(fields))
        value = dice.choice([dice.choice(some).get(key), odd(dice)])
        for event in some:
            event[key] = deepcopy(value)


def _same_argument(dice: random.Random, document: Json) -> None:
    some = [event for event in _some(dice, document) if isinstance(event.get("args"), dict)]
    fields = {key for event in some for key in event["args"]}
    if fields:
        key = dice.choice(sorted(fields))
        value = dice.choice([dice.choice(some)["args"].get(key), odd(dice)])
        for event in some:
            event["args"][key] = deepcopy(value)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0


def _move(dice: random.Random, document: Json) -> None:
    shift = dice.choice([-1e3, 1e3, -1e6, 1e7, 1e12, -1e15, 1e18, 0.001, dice.uniform(-1e5, 1e5)])
    for event in _some(dice, document):
        event["ts"] = _number(event.get("ts")) + shift


def _stretch(dice: random.Random, document: Json) -> None:
    by = dice.choice([0, -1, 1e-3, 10, 1e4, 1e9, 1e15])
    for event in _some(dice, document):
        event["dur"] = _number(event.get("dur")) * by


def _shuffle(dice: random.Random, document: Json) -> None:
    events = document.get("traceEvents")
    if isinstance(events, list):
        dice.shuffle(events) if dice.random() < 0.5 else events.reverse()


def _shuffle_times(dice: random.Random, document: Json) -> None:
    some = _some(dice, document)
    times = [(event.get("ts"), event.get("dur")) for event in some]
    dice.shuffle(times)
    for event, (ts, dur) in zip(some, times, strict=True):
        event["ts"], event["dur"] = ts, dur


def _drop(dice: random.Random, document: Json) -> None:
    gone = {id(event) for event in _some(dice, document)}
    document["traceEvents"] = [event for event in _events(document) if id(event) not in gone]


def _repeat(dice: random.Random, document: Json) -> None:
    copies = [_copy(event) for event in _some(dice, document)]
    shift = dice.choice([0, 0, 1, 1e4])
    for event in copies:
        event["ts"] = _number(event.get("ts")) + shift
    if isinstance(document.get("traceEvents"), list):
        document["traceEvents"] += copies * dice.choice([1, 1, 3])


def _rename(dice: random.Random, document: Json) -> None:
    for event in _some(dice, document):
        event["name"] = dice.choice(NAMES)


def _recategorise(dice: random.Random, document: Json) -> None:
    for event in _some(dice, document):
        event["cat" if dice.random() < 0.7 else "ph"] = dice.choice(CATEGORIES + PHASES)


def _steps(dice: random.Random, document: Json) -> None:
    """Make steps overlap, repeat, or end before they begin."""
    steps = [event for event in _events(document) if str(event.get("name", "")).startswith("ProfilerStep")]
    for event in steps:
        what = dice.random()
        if what < 0.3:
            event["name"] = f"ProfilerStep#{dice.choice([0, 1, 2, 5, 10**6, 10**18])}"
        elif what < 0.6:
            event["dur"] = _number(event.get("dur")) * dice.choice([-1, 0, 0.5, 3, 100])
        else:
            event["ts"] = _number(event.get("ts")) + dice.uniform(-1, 1) * 2 * _number(event.get("dur"))


def _groups(dice: random.Random, document: Json) -> None:
    """Make ranks, groups and sizes contradict each other."""
    info = document.setdefault("distributedInfo", {})
    if isinstance(info, dict) and dice.random() < 0.5:
        info[dice.choice(["rank", "world_size", "pg_count", "backend", "pg_config", "nccl_version"])] = odd(
            dice
        )
    if isinstance(info, dict) and isinstance(info.get("pg_config"), list):
        for group in info["pg_config"]:
            if isinstance(group, dict) and group and dice.random() < 0.5:
                group[dice.choice(list(group))] = odd(dice)
    for event in _some(dice, document):
        if isinstance(event.get("args"), dict):
            for key, value in (
                (
                    "Process Group Ranks",
                    dice.choice(["[0, 1]", "[0, 0]", "[5]", "[0, 1, ..., 7]", "[", [9], ""]),
                ),
                ("Group size", dice.choice([0, 1, 2, -1, 10**9, "2"])),
                ("In msg nelems", dice.choice([0, -5, 10**15, 2**62, "7"])),
                ("Out msg nelems", dice.choice([0, -5, 10**15, 2**62, "7"])),
                ("dtype", dice.choice(["Float", "BFloat16", "None", "", 5])),
                (
                    "Collective name",
                    dice.choice(["allreduce", "_allgather_base", "send", "recv", "wait", "", 3]),
                ),
                ("Process Group Name", dice.choice(["0", "1", "default_pg", "", 5, "x" * 300])),
                ("Seq", dice.choice([0, 1, -1, 2**62, "1"])),
            ):
                if dice.random() < 0.3:
                    event["args"][key] = value


def _header(dice: random.Random, document: Json) -> None:
    document[
        dice.choice([*document, "schemaVersion", "deviceProperties", "baseTimeNanoseconds", "traceEvents"])
    ] = odd(dice)


def _devices(dice: random.Random, document: Json) -> None:
    devices = document.get("deviceProperties")
    for device in devices if isinstance(devices, list) else ():
        if isinstance(device, dict) and device:
            device[dice.choice(list(device))] = odd(dice)


def _foreign_event(dice: random.Random, document: Json) -> None:
    """Put something that is no event among the events."""
    events = document.get("traceEvents")
    if isinstance(events, list):
        events.insert(dice.randint(0, len(events)), odd(dice))


MUTATIONS: tuple[Mutation, ...] = (
    *(_change_field, _remove_field, _swap_fields, _same_value, _same_argument, _move, _stretch, _shuffle),
    *(
        _shuffle_times,
        _drop,
        _repeat,
        _rename,
        _recategorise,
        _steps,
        _groups,
        _header,
        _devices,
        _foreign_event,
    ),
)


def _json(dice: random.Random, document: Json) -> bytes:
    """Return a document as JSON; one in four spelt as Python does: with NaN, Infinity, and spaces."""
    if dice.random() < 0.75:
        with suppress(UnicodeEncodeError):  # a lone surrogate
            return msgspec.json.encode(document)
    return json.dumps(document).encode()


def _text(dice: random.Random, document: Json) -> tuple[bytes, str]:
    """Return a document as JSON, sometimes with fields twice, cut off, or with damaged bytes, and which."""
    text = _json(dice, document)
    what = dice.random()
    if what < 0.08:
        field = dice.choice(
            [b'"ts": 5, ', b'"dur": "x", ', b'"name": "other", ', b'"args": {"a": [}, ', b'"cat": 1, ']
        )
        return text.replace(b'"ph":', field + b'"ph":', dice.randint(1, 50)), "fields twice"
    if what < 0.12:
        return text[: dice.randint(0, len(text))], "cut off"
    if what < 0.16:
        return _damaged(dice, text), "damaged bytes"
    if what < 0.18:
        packed = gzip.compress(text, 1)
        damaged = dice.random() < 0.5
        return _damaged(dice, packed) if damaged else packed[: dice.randint(0, len(packed))], "damaged .gz"
    return text, ""


def _damaged(dice: random.Random, text: bytes) -> bytes:
    damaged = bytearray(text)
    for _ in range(dice.randint(1, 20)):
        damaged[dice.randrange(len(damaged))] = dice.randrange(256)
    return bytes(damaged)


def mutant(number: int, runs: list[Seed], folder: Path) -> tuple[Path, set[str]]:
    """Write mutant ``number`` into a folder of its own; return that, and how it was changed."""
    dice = random.Random(number)
    run = runs[number % len(runs)]
    documents = [_copy(one) for one in (run.steps if dice.random() < 0.2 else run.ranks)]
    kinds = set()
    if dice.random() < 0.1:
        documents.append(_copy(dice.choice(dice.choice(runs).ranks)))
        kinds.add("rank of another job")
    if len(documents) > 1 and dice.random() < 0.1:
        documents.pop(dice.randrange(len(documents)))
        kinds.add("rank missing")
    for _ in range(dice.choice([1, 1, 2, 3, 5, 8])):
        mutate = dice.choice(MUTATIONS)
        kinds.add(mutate.__name__.strip("_").replace("_", " "))
        for document in documents if dice.random() < 0.5 else [dice.choice(documents)]:
            mutate(dice, document)
    target = folder / str(number)
    target.mkdir(parents=True)
    for rank, document in enumerate(documents):
        text, kind = _text(dice, document)
        kinds |= {kind} if kind else set()
        (target / f"rank-{rank}.json").write_bytes(text)
    return target, kinds


@cache
def _rules() -> Any:
    return load_rules(())


def diagnose(folder: Path, number: int) -> str:
    """Diagnose a folder and write every report; return the outcome in a word."""
    try:
        measured = measure([folder], Options(jobs=1))
        diagnosis = judge(measured, _rules())
        if number % 4 == 1:
            what_if(measured.measurements.run, [])
        text = to_json(diagnosis)
        # Where a name is no Unicode, numbers are written otherwise: equal as values.
        again = json.loads(to_json(from_json(text.encode())))
        assert again == json.loads(text), "the JSON reads back as another"
        if number % 4 == 0:
            render(diagnosis, "html")
        else:
            render(diagnosis, "text")
    except TracedocError as error:
        if error.__cause__ is not None and "by a fault of tracedoc's" in error.message:
            raise error.__cause__ from None
        return "refused"
    contained = [limit.message for limit in diagnosis.limits if limit.code == "internal-error"]
    contained += [limit.message for limit in diagnosis.limits if "by a fault of tracedoc's" in limit.message]
    assert not contained, f"contained: {contained[:3]}"
    errors = [
        name
        for name, fact in measured.measurements.facts.items()
        if any(isinstance(value, Failed) for value in (fact.value, *fact.values.values()))
    ]
    errors += [one.rule_id for one in diagnosis.verdicts if one.outcome == "error"]
    assert not errors, f"contained: {errors[:3]}"
    return "diagnosed"


def main() -> int:
    """Try the mutants that the command line names; return how many failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--from", type=int, default=0, dest="first")
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("error")
    runs = seeds()
    print(f"{len(runs)} runs to mutate, tracedoc {tracedoc.__version__}", flush=True)
    tried: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:

        def trial(number: int) -> str:
            folder, kinds = mutant(number, runs, given.keep or Path(scratch))
            tried.update(kinds)
            try:
                return diagnose(folder, number)
            except BaseException:
                failed.update(kinds)
                raise
            finally:
                if given.keep is None:
                    shutil.rmtree(folder)

        count = repeat("traces", range(given.first, given.first + given.count), trial)
    for kind, times in tried.most_common():
        print(f"  {kind}: {times} mutants, {failed[kind]} failed", flush=True)
    return count


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
