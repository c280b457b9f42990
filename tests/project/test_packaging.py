"""Hold that wheel, source distribution and editable install carry everything, above all the rules."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import msgspec
import pytest

NOT_PART_OF_THE_SOURCES = shutil.ignore_patterns(
    ".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis", "report.html"
)


@pytest.fixture(scope="module")
def sources(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the repository, so that building leaves nothing in the real one."""
    copy = tmp_path_factory.mktemp("sources") / "tracedoc"
    shutil.copytree(repository, copy, ignore=NOT_PART_OF_THE_SOURCES)
    return copy


def build(sources: Path, kind: str, into: Path) -> Path:
    """Build a "wheel", "editable" wheel or "sdist" with the declared backend, without the network."""
    script = f"import sys, setuptools.build_meta as backend; print(backend.build_{kind}(sys.argv[1]))"
    into.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", script, str(into)], cwd=sources, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return into / done.stdout.splitlines()[-1]


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
        "import tracedoc, tracedoc.rules.load as load\n"
        "print(tracedoc.__file__)\n"
        "print(*[rule.id for rule in load.load_rules()])\n"
    )
    done = subprocess.run(
        [str(interpreter), "-c", script], cwd=elsewhere, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    where, ids = done.stdout.splitlines()
    return where, ids.split()


def rule_ids(repository: Path) -> set[str]:
    return {path.stem for path in (repository / "rules").glob("*/*.yaml")}


def test_a_wheel_carries_the_rules_and_the_hook(sources: Path, repository: Path, tmp_path: Path) -> None:
    wheel = build(sources, "wheel", tmp_path / "dist")
    with zipfile.ZipFile(wheel) as archive:
        assert "tracedoc/collector/inject/sitecustomize.py" in archive.namelist()
    where, ids = rules_in(clean_environment(wheel, tmp_path / "venv"), tmp_path)
    assert where.startswith(str(tmp_path / "venv"))
    assert set(ids) == rule_ids(repository)


def test_a_wheel_carries_every_data_file(sources: Path, repository: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(build(sources, "wheel", tmp_path / "dist")) as wheel:
        names = set(wheel.namelist())
    data = {
        str(path.relative_to(repository))
        for path in (repository / "tracedoc").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert data <= names
    assert not any(name.startswith(("tests/", "sample_traces/", "rules/")) for name in names)


def test_an_editable_install_finds_the_rules(sources: Path, repository: Path, tmp_path: Path) -> None:
    wheel = build(sources, "editable", tmp_path / "dist")
    where, ids = rules_in(clean_environment(wheel, tmp_path / "venv"), tmp_path)
    assert where == str(sources / "tracedoc" / "__init__.py")
    assert set(ids) == rule_ids(repository)


def test_a_source_distribution_is_the_repository(sources: Path, repository: Path, tmp_path: Path) -> None:
    with tarfile.open(build(sources, "sdist", tmp_path / "dist")) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    wanted = {"LICENSE", "README.md", "CHANGELOG.md", "Makefile", "tests/conftest.py", "tests/oracle.py"}
    wanted |= {
        str(path.relative_to(repository))
        for folder in ("tracedoc", "rules", "sample_traces", "docs")
        for path in (repository / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert wanted <= names


def test_every_package_folder_is_declared(repository: Path) -> None:
    project = msgspec.toml.decode((repository / "pyproject.toml").read_bytes())
    declared = project["tool"]["setuptools"]["packages"]
    present = {
        ".".join(init.parent.relative_to(repository).parts)
        for init in (repository / "tracedoc").rglob("__init__.py")
    }
    assert set(declared) - {"tracedoc.rules.builtin"} == present
