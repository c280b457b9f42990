"""Hold the import table: who may import whom inside tracedoc, and which room may use which package."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tracedoc
from tracedoc.glossary import limits
from tracedoc.judge.rule_cache import builtin_directory

BASE = {
    "errors",
    "units",
    "spans",
    "config",
    "charts",
    "predicted",
    "ledger",
    "values",
    "glossary",
    "idle_causes",
}
STAGES = {
    "pipeline",
    "run",
    "trace",
    "timeline",
    "step",
    "ranks",
    "play",
    "facts",
    "topics",
    "detail",
    "whatif",
    "judge",
    "diagnosis",
    "diagnosis_json",
    "planner",
    "firststep",
}

SHOWN = {"diagnosis", "report.view", "report.texts", "report.words"}
"""What all reports share."""

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "units": set(),
    "spans": set(),
    "config": {"errors", "units"},
    "values": set(),
    "idle_causes": set(),
    "glossary": set(),
    "charts": set(),
    "predicted": {"ledger"},
    "ledger": set(),
    "run": BASE,
    "trace": BASE | {"run"},
    "timeline": BASE | {"trace", "run"},
    "planner": BASE,
    "firststep": {"errors"},
    "diagnosis": BASE,
    "step": BASE | {"trace", "timeline"},
    "ranks": BASE | {"trace", "timeline", "step", "run.job", "run.manifest", "run.steplog"},
    "play": BASE | {"trace", "timeline", "step", "ranks"},
    "facts.catalog": BASE | {"timeline", "step", "ranks.run_view", "run.job"},
    "facts": BASE | {"trace", "timeline", "step", "ranks", "topics"},
    "topics": BASE
    | {"trace", "timeline", "step", "ranks", "facts.catalog", "planner"}
    | {"run.job", "run.manifest", "run.steplog"},
    "detail": BASE | {"trace", "timeline", "step", "ranks", "diagnosis"},
    "whatif": BASE
    | {"trace", "timeline", "step", "ranks", "play", "facts", "topics", "planner", "diagnosis"},
    "judge.fixes": BASE | {"diagnosis"},
    "judge.rule": {"diagnosis"},
    "judge.yaml_file": {"diagnosis", "errors"},
    "judge.rule_cache": {"cache", "errors"},
    "judge.expression": BASE | {"diagnosis"},
    "judge.compose": BASE | STAGES - {"pipeline"},
    "judge": BASE | {"step", "ranks", "play", "facts", "topics", "whatif", "diagnosis"},
    "executors": {"errors"},
    "cache": {"step"},
    "worker": BASE | {"cache", "run", "trace", "timeline", "step", "facts.catalog", "topics"},
    "pipeline": BASE | STAGES | {"executors", "worker"},
    "comparison": BASE | {"diagnosis"},
    "crosscheck": BASE | {"trace", "timeline"},
    "diagnosis_json": BASE | {"diagnosis"},
    "frames": BASE | {"diagnosis", "judge.fixes"},
    "report.texts": BASE | {"diagnosis"},
    "report.words": BASE | {"diagnosis"},
    "report.view": BASE | {"diagnosis", "judge.fixes", "report.texts", "report.words"},
    "report.clock": BASE | {"diagnosis", "report.view"},
    "report.charts": BASE | SHOWN | {"report.clock"},
    "report": BASE | {"diagnosis", "diagnosis_json", "judge.fixes", "comparison"},
    "collector": {"errors", "run.manifest", "run.steplog"},
    "cli": BASE | STAGES | {"executors", "report", "collector", "comparison", "crosscheck", "testing"},
    "testing": BASE | STAGES,
    "__init__": BASE | STAGES | {"report", "collector", "comparison", "frames"},
    "__main__": {"cli"},
}
"""Each room and the rooms it may import beside itself and the package; the longest name that fits counts."""

STANDARD_LIBRARY_ONLY = ("run", "collector", "errors", "firststep")
PACKAGE_MAY_BE_IMPORTED_IN: dict[str, tuple[str, ...]] = {
    "click": ("cli",),
    "rich": ("cli", "report"),
    "jinja2": ("report.page",),
    "matplotlib": ("report.figures", "report.diagnosis_figure"),
    "yaml": ("judge.yaml_file", "testing", "cli"),
    "isal": ("trace",),
    "torch": ("collector", "firststep"),
    "dask": (),
    "distributed": ("executors",),
    "mpi4py": ("executors",),
    "fsspec": ("run.remote",),
    "hta": ("crosscheck.hta_side",),
}
ONLY_INSIDE_FUNCTIONS = {"torch", "pandas", "matplotlib", "hta", "distributed", "mpi4py", "fsspec"}

PACKAGE = Path(tracedoc.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
AROUND = sorted(
    path
    for folder in ("tests", "sample_traces", "benchmarks", "soak", "docs")
    for path in (Path(__file__).resolve().parents[2] / folder).rglob("*.py")
)


def room_of(path: Path) -> str:
    """Return ``judge.load`` for ``tracedoc/judge/load.py``, ``judge`` for its ``__init__``."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imports_of(path: Path) -> Iterator[tuple[str, bool, int]]:
    """Yield every imported module of a file, whether a function holds the import, and its line.

    Imports for type checkers only count like any other: they tie rooms together just as well.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    local = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in local, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports in full"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", id(node) in local, node.lineno


def fits(room: str, allowed: set[str] | tuple[str, ...]) -> bool:
    """Return whether a room or one of the rooms that hold it is in ``allowed``."""
    parts = room.split(".")
    return any(".".join(parts[:length]) in allowed for length in range(1, len(parts) + 1))


def row_of(room: str) -> str:
    """Return the row of the table that holds for a room: the longest name that fits."""
    parts = room.split(".")
    rows = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((row for row in rows if row in MAY_IMPORT), "")


@pytest.mark.parametrize("path", SOURCES, ids=room_of)
def test_imports_follow_the_table(path: Path) -> None:
    room = room_of(path)
    row = row_of(room)
    assert row, f"{path} belongs to no room of the import table"
    own = room.split(".")[0]
    for module, _, line in imports_of(path):
        if not module.startswith("tracedoc."):
            continue
        target = module.removeprefix("tracedoc.")
        inside = target.split(".")[0] == own and not row.startswith(("facts.", "report."))
        if target.startswith("__version__") or inside or fits(target, {row}):
            continue
        assert fits(target, MAY_IMPORT[row]), f"{path}:{line}: {room} may not import {target}"


IN_WORKER = sorted((PACKAGE / "topics").glob("*/rank*.py"))
FOR_WORKER = BASE | {"trace", "timeline", "step", "facts.catalog"}


@pytest.mark.parametrize("path", IN_WORKER, ids=room_of)
def test_what_a_worker_measures_imports_nothing_of_the_driver(path: Path) -> None:
    for module, _, line in imports_of(path):
        target = module.removeprefix("tracedoc.")
        if module.startswith("tracedoc.") and not re.match(r"topics\.\w+\.rank", target):
            assert fits(target, FOR_WORKER), f"{path}:{line}: a worker may not import {target}"


@pytest.mark.parametrize("path", SOURCES, ids=room_of)
def test_packages_are_imported_where_they_belong(path: Path) -> None:
    room = room_of(path)
    for module, inside_function, line in imports_of(path):
        package = module.split(".")[0]
        where = f"{path}:{line}: {room} imports {package}"
        if package in ONLY_INSIDE_FUNCTIONS:
            assert inside_function, f"{where} at the top; import it in the function that needs it"
        if package in PACKAGE_MAY_BE_IMPORTED_IN:
            assert fits(room, PACKAGE_MAY_BE_IMPORTED_IN[package]), where
        if fits(room, STANDARD_LIBRARY_ONLY):
            allowed = {"tracedoc", "torch"} | ({"fsspec"} if room == "run.remote" else set())
            assert package in allowed or package in sys.stdlib_module_names, where
            assert package != "torch" or room == "collector.hook", where


@pytest.mark.parametrize("path", [*SOURCES, *AROUND], ids=lambda path: "-".join(path.parts[-3:]))
def test_a_file_has_one_sentence_and_at_most_500_lines(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 500
    doc = ast.get_docstring(ast.parse(text))
    assert doc, f"{path} does not say what it is"
    assert doc.splitlines()[0].endswith((".", ":", ";")), f"{path}: the first line is not a sentence"


@pytest.mark.parametrize("path", SOURCES, ids=room_of)
def test_no_code_knows_a_rule(path: Path) -> None:
    """What is special about a rule stands in its YAML; the codes of limits may be the ids of rules too."""
    ids = {file.stem for file in builtin_directory().rglob("*.yaml")} - limits().keys()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    literals = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert room_of(path).startswith("testing") or not literals & ids


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


@pytest.mark.parametrize("room", sorted(MAY_IMPORT.keys() | set().union(*MAY_IMPORT.values())))
def test_every_room_of_the_table_exists(room: str) -> None:
    place = PACKAGE.joinpath(*room.split("."))
    assert place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()
