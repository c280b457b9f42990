"""Run jobs one after the other, each rank in a fork of this process, which has imported torch for all.

Importing torch takes each job of these tests longer than its training. Jobs under ``tracedoc collect`` cannot
share it: the collector comes with the interpreter, and leaves forks alone.

    python forks.py '[[{"argv": ["job.py", "ddp"], "environ": {"RANK": "0"}, "output": "job.out"}]]'

Prints the exit codes of each job's ranks.
"""

import json
import os
import runpy
import sys
from typing import Any

import torch._dynamo  # noqa: F401 - the first step of an optimizer imports it


def become(rank: dict[str, Any]) -> None:
    """Run a script in this process as if it had been started with its arguments and environment."""
    file = os.open(rank["output"], os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(rank["environ"])
    sys.argv = rank["argv"]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> None:
    codes = []
    for ranks in json.loads(sys.argv[1]):
        children = []
        for rank in ranks:
            child = os.fork()
            if child == 0:
                return become(rank)
            children.append(child)
        codes.append([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
    print(json.dumps(codes))


main()
