"""Read mutants of real traces with both readers, and hold that nothing tells the two apart.

    python soak/fuzz_readers.py [--count 20000] [--from 0] [--scanner DIR] [--corpus DIR]

``--scanner`` is a folder with another build of the scanner, such as one with sanitizers (``make fuzz``).
``--corpus`` is where chunks of the traces are left for a fuzzer to start from. Mutant N is always the same.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import sys
import time
from pathlib import Path

from seeds import REPOSITORY, seeds

sys.path.insert(0, str(REPOSITORY))

from tests.trace.both_readers import assert_alike
from tests.trace.test_kineto_mutations import mutated
from tracedoc.trace import chunks

MODULE = "tracedoc.trace._scanner"
EVENTS = 60
OPTIONS = ({}, {"long_frames": True}, {"python_functions": True})
CHUNKS = (64, 512, 4096, chunks.CHUNK_BYTES)


def use(folder: Path) -> None:
    """Import the scanner that was built into a folder instead of the installed one."""
    (built,) = folder.glob("_scanner*.so")
    spec = importlib.util.spec_from_file_location(MODULE, built)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    spec.loader.exec_module(module)


def documents() -> list[bytes]:
    """Return pieces of all traces, in several layouts."""
    found = []
    for number, seed in enumerate(seeds()):
        for document in seed.ranks:
            events = document["traceEvents"]
            for begin in range(0, len(events), 4 * EVENTS):
                piece = document | {"traceEvents": events[begin : begin + EVENTS]}
                piece.pop("deviceProperties", None)
                layout = (None, 0, 2)[(number + begin) % 3]
                separators = (",", ":") if layout is None else None
                found.append(json.dumps(piece, indent=layout, separators=separators).encode())
    return found


def leave(pieces: list[bytes], folder: Path) -> None:
    """Write the events of some pieces as a fuzzer takes them: one byte of options, and an array."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, piece in enumerate(pieces[::7]):
        events = json.loads(piece)["traceEvents"][:3]
        (folder / f"{number}").write_bytes(bytes([number % 256]) + json.dumps(events).encode())


def main() -> None:
    """Read mutants until the count is reached, or until the readers differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--from", type=int, default=0, dest="first")
    parser.add_argument("--scanner", type=Path)
    parser.add_argument("--corpus", type=Path)
    options = parser.parse_args()
    if options.scanner is not None:
        use(options.scanner)
    began, pieces = time.monotonic(), documents()
    if options.corpus is not None:
        leave(pieces, options.corpus)
    read = 0
    for number in range(options.first, options.first + options.count):
        chance = random.Random(number)
        data = mutated(chance.choice(pieces), number)
        chosen, chunk_bytes = chance.choice(OPTIONS), chance.choice(CHUNKS)
        try:
            read += not isinstance(assert_alike(data, chunk_bytes, **chosen), tuple)
        except BaseException:
            print(f"mutant {number}, chunks of {chunk_bytes}, {chosen}", file=sys.stderr)
            raise
    print(
        f"{options.count:,} mutants of {len(pieces):,} pieces read alike, {read:,} of them as traces, "
        f"in {time.monotonic() - began:.0f} s"
    )


if __name__ == "__main__":
    main()
