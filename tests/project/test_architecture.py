"""Hold the tables of docs/architecture.md, and how many files and lines there are at most."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

import tracedoc
from tracedoc.glossary import limits
from tracedoc.judge.rule_cache import builtin_directory

MOST_FILES_OF_A_ROOM = 20
"""Python files beside each other in a folder."""
SHORT_FILE = 60
MOST_SHORT_FILES = 8
"""Files of less than ``SHORT_FILE`` lines that could stand with what uses them."""
MOST_LINES_OF_A_FILE = 500

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = Path(tracedoc.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
AROUND = sorted(
    path
    for folder in ("tests", "sample_traces", "benchmarks", "soak", "docs", "requirements")
    for path in (REPOSITORY / folder).rglob("*.py")
)


# -- the tables


@dataclass(frozen=True)
class Row:
    """A row of the table of rooms: which rooms it is about, and which ones they may import."""

    number: int
    rooms: tuple[str, ...]
    anywhere: frozenset[str]
    inside_functions: frozenset[str]
    standard_library_only: bool


def cells(heading: str) -> list[list[str]]:
    """The cells of a table's rows, found by the name of its first column."""
    text = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = text.split(f"\n| {heading} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def names(cell: str) -> list[str]:
    """The modules in a cell, as ``facts.per_rank`` for `facts/per_rank/`."""
    return [name.rstrip("/").replace("/", ".") for name in re.findall("`([^`]+)`", cell)]


def words(cell: str) -> set[str]:
    """What a cell says beside the modules."""
    return {word.strip() for word in re.split("[,;]", re.sub("`[^`]+`", "", cell))} - {""}


@cache
def table() -> tuple[Row, ...]:
    """The rows of the map, from what imports nothing to what may import everything."""
    rows: list[Row] = []
    above: set[str] = set()
    base: set[str] = set()
    for number, (rooms, _, may_import) in enumerate(cells("room")):
        if not base and "/" in rooms:
            base |= above
        anywhere, _, inside_functions = may_import.partition("inside functions")
        groups = {"the base": base, "everything above": above, "nothing of ours": set()}
        said = words(anywhere) - {"standard library only"}
        assert said | words(inside_functions) <= groups.keys(), f"{rooms}: what is {said - groups.keys()}?"
        allowed = frozenset(names(anywhere)).union(*(groups[word] for word in said))
        only = "standard library only" in may_import
        rows.append(Row(number, tuple(names(rooms)), allowed, frozenset(names(inside_functions)), only))
        above |= set(names(rooms))
    return tuple(rows)


@cache
def row_of(module: str) -> Row:
    """The row that holds for a module: that with the longest name that fits."""
    fitting = [(len(name), row) for row in table() for name in row.rooms if lies_in(module, {name})]
    assert fitting, f"{module} belongs to no room of the table in docs/architecture.md"
    return max(fitting, key=lambda found: found[0])[1]


@dataclass(frozen=True)
class PackageRow:
    """A package that may not be imported everywhere."""

    rooms: frozenset[str]
    at_the_top: bool


@cache
def packages() -> dict[str, PackageRow]:
    """The rows of the table of packages."""
    return {
        package: PackageRow(frozenset(names(where)), {"yes": True, "no": False}[top])
        for listed, where, top in cells("package")
        for package in names(listed)
    }


# -- what the files import


def module_of(path: Path) -> str:
    """``judge.load`` for ``tracedoc/judge/load.py``, ``judge`` for its ``__init__``."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module_of(path) for path in SOURCES}


@dataclass(frozen=True)
class Source:
    """What a file imports, whether a function holds the import, and its line; and its literals.

    Imports for type checkers only count like any other: they tie rooms together just as well.
    """

    imports: tuple[tuple[str, bool, int], ...]
    literals: frozenset[object]


@cache
def source(path: Path) -> Source:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imports: list[tuple[str, bool, int]] = []
    literals = set()
    waiting: list[tuple[ast.AST, bool]] = [(tree, False)]
    while waiting:
        node, local = waiting.pop()
        if isinstance(node, ast.Import):
            imports += [(alias.name, local, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports in full"
            imports += [(f"{node.module}.{alias.name}", local, node.lineno) for alias in node.names]
        elif isinstance(node, ast.Constant):
            literals.add(node.value)
        within = local or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        waiting += [(child, within) for child in ast.iter_child_nodes(node)]
    return Source(tuple(imports), frozenset(literals))


def own_imports(path: Path) -> Iterator[tuple[str, bool, int]]:
    """The modules of tracedoc that a file imports; names of the package itself are left out."""
    for imported, local, line in source(path).imports:
        parts = imported.split(".")[1:] if imported.startswith("tracedoc.") else []
        while parts and ".".join(parts) not in MODULES:
            parts.pop()
        if parts:
            yield ".".join(parts), local, line


def lies_in(module: str, rooms: set[str] | frozenset[str]) -> bool:
    """Whether a module or a room that holds it is among ``rooms``; ``*`` stands for a part of a name."""
    parts = module.split(".")
    return any(
        len(wanted := room.split(".")) <= len(parts) and all(map(fnmatchcase, parts, wanted))
        for room in rooms
    )


def test_imports_follow_the_table() -> None:
    for path in SOURCES:
        row = row_of(module_of(path))
        for module, local, line in own_imports(path):
            allowed = row.anywhere | row.inside_functions if local else row.anywhere
            follows = row_of(module) == row or lies_in(module, allowed)
            assert follows, f"{path}:{line}: {module_of(path)} may not import {module}"


@pytest.mark.parametrize("row", table(), ids=lambda row: row.rooms[0])
def test_a_room_imports_what_stands_above_it(row: Row) -> None:
    """Data flows one way; what shows itself may call its report, inside functions."""
    named = (*row.rooms, *row.anywhere, *row.inside_functions)
    missing = [name for name in named if not any(lies_in(module, {name}) for module in MODULES)]
    assert missing == [], "the table names what is not there"
    below = {name for other in table()[row.number + 1 :] for name in other.rooms}
    assert row.anywhere & below == set()


@pytest.mark.parametrize("row", table(), ids=lambda row: row.rooms[0])
def test_the_table_allows_nothing_that_no_file_needs(row: Row) -> None:
    named = set(names(cells("room")[row.number][2]))
    files = [path for path in SOURCES if row_of(module_of(path)) == row]
    needed = {module for path in files for module, _, _ in own_imports(path)}
    assert [name for name in sorted(named) if not any(lies_in(module, {name}) for module in needed)] == []


def test_packages_are_imported_where_they_belong() -> None:
    named = [(path, *one) for path in SOURCES for one in source(path).imports]
    for file, imported, local, line in named:
        module, package = module_of(file), imported.split(".")[0]
        where = f"{file}:{line}: {module} imports {package}"
        row = packages().get(package)
        if row is not None:
            assert lies_in(module, row.rooms), where
            assert local or row.at_the_top, f"{where} at the top; import it in the function that needs it"
        elif row_of(module).standard_library_only:
            assert package == "tracedoc" or package in sys.stdlib_module_names, where


# -- files and names


def test_no_code_knows_a_rule() -> None:
    """What is special about a rule stands in its YAML; the codes of limits may be the ids of rules too."""
    ids = {file.stem for file in builtin_directory().rglob("*.yaml")} - limits().keys()
    for path in SOURCES:
        assert module_of(path).startswith("testing") or not source(path).literals & ids, path


def test_no_room_has_too_many_files() -> None:
    folders = {path.parent for path in SOURCES}
    crowded = {str(folder): len(list(folder.glob("*.py"))) for folder in folders}
    assert {folder: count for folder, count in crowded.items() if count > MOST_FILES_OF_A_ROOM} == {}


def test_few_files_are_short() -> None:
    """An empty ``__init__.py`` only says that a folder is a package."""
    short = [path for path in SOURCES if path.name != "__init__.py" and len(lines_of(path)) < SHORT_FILE]
    assert len(short) <= MOST_SHORT_FILES, "\n".join(map(str, short))


@cache
def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def test_a_file_has_one_sentence_and_at_most_500_lines() -> None:
    for path in (*SOURCES, *AROUND):
        assert len(lines_of(path)) <= MOST_LINES_OF_A_FILE, path
        first = next(line for line in lines_of(path) if not line.startswith("#"))
        assert first.startswith('"""'), f"{path} does not say what it is"
        assert first.removesuffix('"""').endswith((".", ":", ";")), f"{path}: its first line is no sentence"


def public_functions() -> Iterator[tuple[str, object]]:
    for info in pkgutil.walk_packages([str(PACKAGE)], "tracedoc."):
        if info.name.endswith("__main__") or ".builtin" in info.name:
            continue
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            if name.startswith("_") or getattr(value, "__module__", None) != info.name:
                continue
            if inspect.isfunction(value) or inspect.isclass(value):
                yield f"{info.name}.{name}", value


def test_every_public_function_and_class_has_a_docstring() -> None:
    silent = [name for name, value in public_functions() if not inspect.getdoc(value)]
    assert silent == []


def test_every_public_name_of_the_package_resolves() -> None:
    missing = [name for name in getattr(tracedoc, "__all__", ()) if not hasattr(tracedoc, name)]
    assert missing == []


def test_no_public_function_shares_its_name_with_a_submodule() -> None:
    submodules = {info.name for info in pkgutil.iter_modules([str(PACKAGE)])}
    shared = [name for name in getattr(tracedoc, "__all__", ()) if name in submodules]
    assert shared == []
