"""Start N copies of a script as the ranks of one job, as torchrun does, without importing torch itself.

    python ranks.py N script.py [arguments]

Ends with the first exit code that is not 0, after all copies have ended; passes SIGTERM on.
"""

import os
import signal
import subprocess
import sys
import tempfile


def main() -> int:
    count, command = int(sys.argv[1]), sys.argv[2:]
    # Ranks meet in a file: a port that is free now may not be in a second.
    job = {"STORE": tempfile.mktemp(), "WORLD_SIZE": str(count)}
    ranks = [
        subprocess.Popen(
            [sys.executable, *command], env={**os.environ, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(count)
    ]
    signal.signal(signal.SIGTERM, lambda number, frame: [rank.terminate() for rank in ranks])
    codes = [rank.wait() for rank in ranks]
    bad = [code for code in codes if code]
    return (bad[0] if bad[0] > 0 else 128 - bad[0]) if bad else 0


sys.exit(main())
