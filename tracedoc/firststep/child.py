"""The process of an estimate: ``python -m tracedoc.firststep.child SCRIPT [ARGUMENTS]``.

Its answer is one line of JSON on the standard output; what the script prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from tracedoc.firststep.allocations import Allocations, arithmetic, counting
from tracedoc.firststep.fake_gpu import fake_gpu, on_host
from tracedoc.firststep.guard import RefusedError, forbid_effects
from tracedoc.firststep.step import Follower


def main() -> None:
    """Run the script to its first update, and answer."""
    answers = os.dup(1)
    os.dup2(2, 1)

    def answer(found: dict[str, Any]) -> NoReturn:
        os.write(answers, json.dumps(found).encode() + b"\n")
        os._exit(0)  # nothing of the script runs any more, not even what it does at its end

    try:
        fake_mode = import_module("torch._subclasses.fake_tensor").FakeTensorMode
    except ImportError as error:
        answer({"error": f"torch cannot be imported: {error}", "no_torch": True})
    fake = fake_mode(allow_non_fake_inputs=True)
    settings = fake_gpu(fake)
    allocations, flops = Allocations(), arithmetic()
    follower = Follower(allocations, settings, flops, answer)
    follower.follow()
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    forbid_effects()
    try:
        with fake, flops, counting(allocations, follower.parameters), on_host():
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        answer({"error": f"it ended before its first update (exit code {end.code})"})
    except BaseException as error:
        traceback.print_exc()
        answer({"error": told(error, script)})
    answer({"error": "it ended before its first update"})


def told(error: BaseException, script: str) -> str:
    """Return an error in one line, with the line of the script that led to it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = next((f for f in reversed(frames) if Path(f.filename).resolve() == Path(script).resolve()), None)
    where = f" (line {place.lineno}: {place.line})" if place else ""
    if isinstance(error, RefusedError):
        return f"{error}{where}"
    kind = type(error).__name__
    if kind in ("DataDependentOutputException", "DynamicOutputShapeException"):
        return f"its step depends on values, at {str(error).splitlines()[0]}{where}"
    first = (str(error).strip().splitlines() or [""])[0][:200]
    return f"{kind}: {first}{where}"


if __name__ == "__main__":
    main()
