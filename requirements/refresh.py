"""Write constraints.txt anew: the newest version of each package that an environment of the Makefile holds.

Run it as ``make constraints``, in the environment of the tests: deepspeed asks torch how to build, even to
say what it needs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ENVIRONMENTS = (
    ("test", "lint", "loaders"),
    ("docs",),
    ("hta",),
    ("traceinsight",),
    ("gpu-idle",),
    ("wheel",),
)
"""The files that are installed together."""
OWN_PINS = ("pandas",)
"""The tools that tracedoc is compared with need a version of their own, which their files pin."""
HEAD = """\
# The version of each package in the environments of the tests, the checks, the site and the benchmarks, with
# all that they bring along. `make constraints` writes it anew; on an earlier Python than that the newest of
# what it can take are installed.
"""


def versions(files: tuple[str, ...], known: dict[str, str]) -> dict[str, str]:
    """The versions that pip would install for files of requirements, where those of ``known`` are given."""
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder) / "given.txt"
        given.write_text("".join(f"{name}=={version}\n" for name, version in known.items()))
        report = Path(folder) / "report.json"
        pip = (
            "-m pip install -qq --disable-pip-version-check --dry-run --ignore-installed --no-build-isolation"
        )
        command = [sys.executable, *pip.split(), "--report", str(report), "--constraint", str(given)]
        command += [str(FOLDER.parent)] if "test" in files else []
        command += [f"--requirement={FOLDER / file}.txt" for file in files]
        subprocess.run(command, env=os.environ | {"DS_BUILD_OPS": "0"}, check=True)
        found = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    return {item["name"].lower().replace("_", "-"): item["version"].partition("+")[0] for item in found}


def main() -> None:
    """Ask for one environment after the other, each with what is known by then."""
    known: dict[str, str] = {}
    for files in ENVIRONMENTS:
        free = {name: version for name, version in known.items() if name not in OWN_PINS}
        known = versions(files, free) | known
    del known["tracedoc"]
    since = f'python_version >= "{sys.version_info.major}.{sys.version_info.minor}"'
    lines = [f"{name}=={version}; {since}\n" for name, version in sorted(known.items())]
    (FOLDER / "constraints.txt").write_text(HEAD + "".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
