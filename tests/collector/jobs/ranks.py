"""Start N copies of a script as the ranks of one job, as torchrun does, without importing torch itself.

    python ranks.py [--warm ADDRESS] N script.py [arguments]

With an address they are forks of the process there (``tests/warm_torch.py``). One copy is no rank of a job.
Ends with the first exit code that is not 0, after all copies have ended; passes SIGTERM on. Forks know by
``PARENT`` which process would be their parent: this one, or that of a single script.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> int:
    words = sys.argv[1:]
    address = words[1] if words[0] == "--warm" else ""
    count, *command = words[2:] if address else words
    # Ranks meet in a file: a port that is free now may not be in a second.
    job = {"STORE": tempfile.mktemp(), "WORLD_SIZE": count} if count != "1" else {}
    ranks = []
    for rank in range(int(count)):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if job else {}
        environ = {**os.environ, **job, **own}
        if address:
            sys.path.append(str(Path(__file__).parents[3]))
            from tests.warm_torch import start_rank

            environ["PARENT"] = str(os.getppid() if count == "1" else os.getpid())
            ranks.append(start_rank(address, command, environ, (0, 1, 2)))
        else:
            ranks.append(subprocess.Popen([sys.executable, *command], env=environ))
    signal.signal(signal.SIGTERM, lambda number, frame: [end(rank.pid) for rank in ranks])
    codes = [rank.wait() for rank in ranks]
    bad = [code for code in codes if code]
    return (bad[0] if bad[0] > 0 else 128 - bad[0]) if bad else 0


def end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)


sys.exit(main())
