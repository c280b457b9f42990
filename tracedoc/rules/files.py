"""Find rule files: those that come with tracedoc, and those of packs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tracedoc.errors import RuleError

MAX_RULES = 1000
"""Rule files in one pack; each takes milliseconds to check."""


def builtin_directory() -> Path:
    """Return the folder of tracedoc's own rules: inside the package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    for directory in (package / "builtin", package.parents[1] / "rules"):
        if directory.is_dir():
            return directory
    raise RuleError("the rules that come with tracedoc are missing", "install tracedoc again")


def files_of(directories: Iterable[str | Path]) -> list[Path]:
    """Return the files that :func:`tracedoc.rules.load.load_rules` reads."""
    folders = (builtin_directory(), *map(Path, directories))
    return [path for folder in folders for path in rule_files(folder)]


def rule_files(directory: Path) -> list[Path]:
    """Return the rule files of a folder and of its sub-folders, but for ``tests``, each in order.

    Raises :class:`RuleError` for what is no folder, holds too many, or files that end in ``.yml``.
    """
    if not directory.is_dir():
        raise RuleError(f"{directory}: not a folder", "name a folder of rule files (*.yaml)")
    folders = [directory, *sorted(path for path in directory.iterdir() if path.is_dir())]
    files: list[Path] = []
    for folder in folders:
        if folder != directory and (folder.name == "tests" or folder.name.startswith(".")):
            continue
        for path in sorted(folder.iterdir()):
            if path.suffix == ".yml":
                raise RuleError(f"{path}: rule files end in .yaml", f"rename it to {path.stem}.yaml")
            if path.suffix == ".yaml" and not path.name.startswith("."):
                files.append(path)
    if len(files) > MAX_RULES:
        raise RuleError(
            f"{directory}: {len(files)} rule files, and a pack holds at most {MAX_RULES}",
            "divide it into several packs, and load those that fit the job",
        )
    return files
