"""Hold that wheel, source distribution and editable install carry everything, above all the rules."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import msgspec
import pytest

from requirements.wheel import REPOSITORY, build, check_changelog, version_in
from tracedoc.trace.reader import VARIABLE

NOT_PART_OF_THE_SOURCES = shutil.ignore_patterns(
    ".git",
    ".venv*",
    "build",
    "dist",
    "*.egg-info",
    "__pycache__",
    "*.so",
    "*.pyd",
    ".*_cache",
    ".hypothesis",
    "report.html",
)
MADE_HERE = {".pyc", ".so", ".pyd"}


@pytest.fixture(scope="module")
def sources(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the repository, so that building leaves nothing in the real one."""
    copy = tmp_path_factory.mktemp("sources") / "tracedoc"
    shutil.copytree(repository, copy, ignore=NOT_PART_OF_THE_SOURCES)
    return copy


def clean_environment(wheel: Path, at: Path) -> Path:
    """Return the interpreter of a new environment that holds the wheel, and our dependencies by path.

    A directory named in a ``.pth`` file is searched, but its own ``.pth`` files are not read: an editable
    install of tracedoc in the present environment stays out of sight.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(at)], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = at / "lib" / version / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return at / "bin" / "python"


def rules_in(interpreter: Path, elsewhere: Path) -> tuple[str, list[str]]:
    """Return where tracedoc was found, and the ids of the built-in rules."""
    script = (
        "import tracedoc, tracedoc.judge.load as load\n"
        "print(tracedoc.__file__)\n"
        "print(*[rule.id for rule in load.load_rules()])\n"
    )
    done = subprocess.run(
        [str(interpreter), "-c", script], cwd=elsewhere, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    where, ids = done.stdout.splitlines()
    return where, ids.split()


def reader_in(interpreter: Path, elsewhere: Path) -> str:
    """Return what an installed tracedoc says of itself."""
    done = subprocess.run(
        [str(interpreter), "-m", "tracedoc", "--version"],
        cwd=elsewhere,
        env={name: value for name, value in os.environ.items() if name != VARIABLE},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("(")[1].strip(")\n")


def rule_ids(repository: Path) -> set[str]:
    return {path.stem for path in (repository / "rules").glob("*/*.yaml")}


@pytest.mark.soak
def test_a_wheel_carries_the_rules_and_the_hook(sources: Path, repository: Path, tmp_path: Path) -> None:
    wheel = build(sources, "wheel", tmp_path / "dist")
    with zipfile.ZipFile(wheel) as archive:
        assert "tracedoc/collector/inject/sitecustomize.py" in archive.namelist()
    where, ids = rules_in(clean_environment(wheel, tmp_path / "venv"), tmp_path)
    assert where.startswith(str(tmp_path / "venv"))
    assert set(ids) == rule_ids(repository)


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_a_wheel_reads_natively_where_there_is_a_compiler(sources: Path, tmp_path: Path) -> None:
    wheel = build(sources, "wheel", tmp_path / "dist")
    assert reader_in(clean_environment(wheel, tmp_path / "venv"), tmp_path) == "native reader"


@pytest.mark.soak
def test_a_wheel_is_built_without_a_compiler(repository: Path, tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    shutil.copytree(repository, sources, ignore=NOT_PART_OF_THE_SOURCES)
    wheel = build(sources, "wheel", tmp_path / "dist", CC="/bin/false")
    interpreter = clean_environment(wheel, tmp_path / "venv")
    assert reader_in(interpreter, tmp_path) == "python reader"
    assert set(rules_in(interpreter, tmp_path)[1]) == rule_ids(repository)


@pytest.mark.soak
def test_a_wheel_carries_every_data_file(sources: Path, repository: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(build(sources, "wheel", tmp_path / "dist")) as wheel:
        names = set(wheel.namelist())
    data = {
        str(path.relative_to(repository))
        for path in (repository / "tracedoc").rglob("*")
        if path.is_file() and path.suffix not in MADE_HERE
    }
    assert data <= names
    assert not any(name.startswith(("tests/", "sample_traces/", "rules/")) for name in names)


@pytest.mark.soak
def test_an_editable_install_finds_the_rules(sources: Path, repository: Path, tmp_path: Path) -> None:
    wheel = build(sources, "editable", tmp_path / "dist")
    where, ids = rules_in(clean_environment(wheel, tmp_path / "venv"), tmp_path)
    assert where == str(sources / "tracedoc" / "__init__.py")
    assert set(ids) == rule_ids(repository)


@pytest.mark.soak
def test_a_source_distribution_is_the_repository(sources: Path, repository: Path, tmp_path: Path) -> None:
    with tarfile.open(build(sources, "sdist", tmp_path / "dist")) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    wanted = {"LICENSE", "README.md", "CHANGELOG.md", "Makefile", "tests/conftest.py", "tests/oracle.py"}
    wanted |= {
        str(path.relative_to(repository))
        for folder in ("tracedoc", "rules", "sample_traces", "docs", "native")
        for path in (repository / folder).rglob("*")
        if path.is_file() and path.suffix not in MADE_HERE
    }
    assert wanted <= names


def changelog(*sections: str) -> str:
    return "# Changelog\n\n## 1.2.0 (2026-01-31)\n\n" + "\n".join(sections) + "\n## 1.1.0 (2025-01-31)\n"


def test_the_changelog_is_that_of_the_version() -> None:
    text = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    assert check_changelog(text, version_in(REPOSITORY))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (changelog("### Added\n\n- One, over\n  two lines.\n\n- Two.\n", "### Fixed\n\n- Three.\n"), ""),
        (changelog("### Fixed\n\n- Three.\n", "### Added\n\n- One.\n"), "in this order"),
        (changelog("### Improved\n\n- One.\n"), "Improved"),
        (changelog("- One.\n"), "entries stand under"),
        (changelog("### Added\n\n"), "Added is no list"),
        (changelog("### Added\n\nOne.\n"), "Added is no list"),
        (changelog("### Added\n\n- One.\n").replace("1.2.0", "1.3.0"), "1.2.0 (date) is expected"),
        (changelog("### Added\n\n- One.\n").replace("2026-01-31", "soon"), "1.2.0 (date) is expected"),
    ],
)
def test_a_changelog_has_its_entries_by_kind(text: str, said: str) -> None:
    if not said:
        assert check_changelog(text, "1.2.0") == "2026-01-31"
        return
    with pytest.raises(SystemExit, match=re.escape(said)):
        check_changelog(text, "1.2.0")


@pytest.mark.soak
def test_a_wheel_for_every_platform_reads_without_the_native_part(sources: Path, tmp_path: Path) -> None:
    wheel = build(sources, "wheel", tmp_path / "dist", TRACEDOC_PURE="1")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert reader_in(clean_environment(wheel, tmp_path / "venv"), tmp_path) == "python reader"


def test_everything_that_is_installed_for_the_tests_has_one_version(repository: Path) -> None:
    """The versions of ``make constraints`` name no server: where packages come from is up to the machine."""
    listed = (repository / "requirements" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in listed if not line.startswith("#")]
    pinned = {re.fullmatch(r'([a-z0-9.-]+)==[\w.]+; python_version >= "3\.\d+"', line)[1] for line in pins}
    project = msgspec.toml.decode((repository / "pyproject.toml").read_bytes())["project"]
    asked = [line for line in project["dependencies"] if ";" not in line]
    for file in sorted((repository / "requirements").glob("*.txt")):
        asked += file.read_text(encoding="utf-8").splitlines() if file.stem != "constraints" else []
    names = {re.split("[=<>;]", line)[0].lower() for line in asked if line and line[0] not in "#-"}
    assert names - pinned == set()
