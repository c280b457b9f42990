"""Run every command of every document in a fresh checkout, in the order in which a reader types them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.simulated.machine import play
from tests.simulated.programs import programs
from tests.simulated.spec import Job
from tests.simulated.traces import Capture, write_traces
from tracedoc.cli import main

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md")),
    *(REPOSITORY / folder / "README.md" for folder in ("benchmarks", "sample_traces")),
    *sorted((REPOSITORY / "docs").glob("*.md")),
]
PROGRAMS = {
    "tracedoc",
    "torchrun",
    "mpiexec",
    "make",
    "python",
    ".venv/bin/python",
    "pip",
    "pre-commit",
    "git",
    "cp",
}

# What is not run here, and why. Whatever else a document names is run.
BY_CI = ".ci/run runs it for every change"
LASTS = "takes from minutes to hours, and is run when its numbers are renewed"
SANITIZERS = "builds the reader with the sanitizers of a compiler; takes minutes"
NETWORK = "asks a package index or a store on the network"
NAMED = "names an option; the command itself is left out"
EXAMPLE = "is of the worked example, which test_worked_example.py follows"
AGAIN = "starts a job again and again; tests/trials does so with a small one"
RUNNING = "asks a job that runs; tests/running does so"
OTHER_TOOL = "asks HolisticTraceAnalysis; tests/differential/test_cross_check.py runs it"
PACKAGES = "asks a package index; test_packaging.py builds and installs the wheel"
PYARROW = "needs pyarrow; tests/step/test_kernel_times.py has it"
EXTRAS = ("dask", "hta", "mcp", "mpi", "parquet", "remote")
CI = ("test", "wheel", "shipped", "lint", "oldest", "newest", "docs")
NOT_RUN = {
    **dict.fromkeys((f"make {name}" for name in CI), BY_CI),
    **dict.fromkeys((f"make {name}" for name in ("soak", "mutate", "pythons")), LASTS),
    **dict.fromkeys((f"make bench{name}" for name in ("", "-plan", "-replay", "-truth", "-try")), LASTS),
    "tracedoc kernels runs/a -f parquet > kernels.parquet": PYARROW,
    "tracedoc try RUN": AGAIN,
    "tracedoc try runs/a": AGAIN,
    'tracedoc try runs/a "DataLoader(num_workers=4)" "OMP_NUM_THREADS=2" "DDP(static_graph=True)"': AGAIN,
    'tracedoc try runs/a "os.sched_setaffinity(0, range(16 * local_rank, 16 * local_rank + 16))"': AGAIN,
    "tracedoc try runs/a --env WANDB_MODE=disabled -- torchrun train.py --output_dir /tmp/trial": AGAIN,
    "python benchmarks/run.py --quick": LASTS,
    "python benchmarks/rules.py": LASTS,
    ".venv/bin/python benchmarks/page.py": LASTS,
    "python benchmarks/collect.py --write": LASTS,
    "python soak/compared_runs.py": LASTS,
    "python soak/predicted_runs.py": LASTS,
    "python soak/real_runs.py": LASTS,
    "python soak/named_runs.py": LASTS,
    "make refresh": "makes what is kept anew, in minutes; tests hold that it is current",
    **dict.fromkeys(
        (f"pip install {what}" for what in (".", *(f"'.[{extra}]'" for extra in EXTRAS))), PACKAGES
    ),
    "make fuzz": SANITIZERS,
    "make constraints": NETWORK,
    "git clone https://forge.example/OWNER/tracedoc && cd tracedoc": NETWORK,
    "pip install pre-commit": NETWORK,
    "pre-commit install": NETWORK,
    "pip install git+https://forge.example/OWNER/tracedoc": NETWORK,
    "tracedoc diagnose s3://bucket/runs/a": NETWORK,
    "tracedoc diagnose https://host/runs/a/rank-0.json.gz": NETWORK,
    "tracedoc diagnose /shared/runs/a --executor dask://scheduler-host:8786": "asks a cluster",
    "mpiexec -n 64 tracedoc diagnose /shared/runs/a --executor mpi -o diagnosis.json": "asks a cluster",
    "tracedoc collect -- srun ...": "asks SLURM",
    "torchrun --nproc-per-node 8 -m tracedoc plan --measure": "measures GPUs",
    "tracedoc explain largest_collective_frac": EXAMPLE,
    "tracedoc facts RUN --cross-check": OTHER_TOOL,
    "tracedoc collect --ranks 0,777": NAMED,
    "tracedoc collect --baseline": NAMED,
    "tracedoc collect -- torchrun": NAMED,
    **dict.fromkeys(
        (
            "tracedoc collect --again RUN",
            "tracedoc collect --again runs/a --active 5 --diagnose",
            "tracedoc collect --from dynolog",
            'tracedoc collect --from dynolog --seconds 3 --job-id "$SLURM_JOB_ID" -o /shared/runs/now',
            "tracedoc collect --from dynolog://node7:1778 -o /shared/runs/now",
            "tracedoc collect --from http://HOST:25999",
            "tracedoc collect --from http://node0:25999 --seconds 3 -o runs/now",
            "tracedoc diagnose /tmp/dumps",
            "tracedoc watch RUN",
            "tracedoc watch runs/a",
            "tracedoc watch runs/a --on-drift capture --prometheus /var/lib/node_exporter/tracedoc.prom",
        ),
        RUNNING,
    ),
    "make bench-try": LASTS,
    'make bench-try TRY="--budget 150s"': LASTS,
    "python -E": NAMED,
    "python -I": NAMED,
}

# Real jobs, on CPU; and what takes more than a few seconds.
JOB = re.compile(r"tracedoc collect (?!--dry-run).*-- |torchrun ")
LONG = {
    "python soak/fuzz_traces.py --from N --count M",
    "tracedoc rules test tests/rules",
    "tracedoc diagnose runs/a --executor dask://local --jobs 8",
    ".venv/bin/python -m pytest tests/rules -k tiny",
}
# As many ranks as a machine with two cores has time for.
RANKS = re.compile(r"(--nproc[-_]per[-_]node) 8")

# What stands for something of the reader's: words, and folders with runs.
WORDS = {
    "WORD": "straggler",
    "NAME": "tiny-batch",
    "ID": "tiny-batch",
    "FACT": "step_ms",
    "SHELL": "bash",
    "COMMAND": "torchrun --nproc-per-node 8 train.py",
    "N": "0",
    "M": "20",
}
SLOW, FAST = "cpu_ddp_slow_metrics", "cpu_ddp_rare_metrics"
RUNS = {
    **dict.fromkeys(("RUN", "FOLDER", "BEFORE", "BASE", "sample_traces/tiny-batch"), SLOW),
    **dict.fromkeys(("AFTER", "HEAD", "DIR/baseline", "DIR/later"), FAST),
    **dict.fromkeys(("runs/before", "runs/a", "runs/today", "tracedoc-runs/20260102-030405-train"), SLOW),
    **dict.fromkeys(("runs/after", "runs/a/baseline"), FAST),
}


def name_of(document: Path) -> str:
    return str(document.relative_to(REPOSITORY))


def commands_of(document: Path) -> list[str]:
    """The commands that a reader types, in the order of the text.

    These are lines of `sh` blocks, lines after `$` or the dash of a YAML list in others, and those within
    lines. Left out are outputs, the commands that they are of (test_documents.py runs them), and the bare
    names of programs.
    """
    text = document.read_text(encoding="utf-8")
    outputs = re.findall(r"<!-- output: tracedoc (.*?) -->", text)
    shown = {f"tracedoc {arguments.partition(' | head')[0]}" for arguments in outputs}
    text = re.sub(r"<!-- output:.*?<!-- end of output -->", "", text, flags=re.S)
    found: list[str] = []
    for language, block, within in re.findall(r"^```(\w*)\n(.*?)^```|`([^`]+)`", text, re.M | re.S):
        if within:
            found.append(" ".join(within.split()).removesuffix(" --"))
        else:
            before = r"" if language == "sh" else r" *- (?:run: )?" if language == "yaml" else r"\$ "
            found += re.findall(rf"^{before}([\w./-]+ .*?)(?: +# .*)?$", block, re.M)
    return [one for one in found if one.split(" ")[0] in PROGRAMS and " " in one and one not in shown]


ALL = {document: commands_of(document) for document in DOCUMENTS}
RUN_HERE = {
    document: [command for command in commands if command not in NOT_RUN]
    for document, commands in ALL.items()
}


def is_long(command: str) -> bool:
    return bool(JOB.match(command)) or command in LONG


def short_ones() -> dict[Path, list[str]]:
    """What takes seconds, by document; what makes no file is run for the first document that has it."""
    makes = re.compile(r" (-o|>|>>) |^(cp|make) ")
    first: dict[str, Path] = {}

    def is_run(document: Path, command: str) -> bool:
        known = first.setdefault(command, document) != document and not makes.search(command)
        return not known and not is_long(command)

    return {
        document: [command for command in commands if is_run(document, command)]
        for document, commands in RUN_HERE.items()
    }


SHORT = short_ones()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what is tracked, in which programs start with the Python of this environment.

    The job of the reader is the one that ships, with 80 of its 200 steps.
    """
    folder, programs = tmp_path / "tracedoc", tmp_path / "tracedoc" / ".venv" / "bin"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, check=True)
    for name in tracked.stdout.decode().strip("\0").split("\0"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, folder / name)
    # The native reader, and bytecode, which would be the same: compiling takes each program a second.
    for pattern in ("_scanner*", f"__pycache__/*.{sys.implementation.cache_tag}.pyc"):
        for made in (REPOSITORY / "tracedoc").rglob(pattern):
            copy = folder / made.relative_to(REPOSITORY)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(made, copy)
    programs.mkdir(parents=True)
    scripts = {
        "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
        "tracedoc": f"#!{sys.executable}\nfrom tracedoc.__main__ import main\nmain()\n",
        "torchrun": f"#!{sys.executable}\nfrom torch.distributed.run import main\nmain()\n",
        "accelerate": f"#!{sys.executable}\nfrom accelerate.commands.accelerate_cli import main\nmain()\n",
    }
    for name, text in scripts.items():
        (programs / name).write_text(text, encoding="utf-8")
        (programs / name).chmod(0o755)
    for stamp in ("python", "installed", "test-installed"):
        (folder / ".venv" / stamp).touch()
    script = (folder / "sample_traces" / "train_with_metrics.py").read_text(encoding="utf-8")
    (folder / "train.py").write_text(script.replace("range(200)", "range(80)"), encoding="utf-8")
    (tmp_path / "home" / ".config" / "fish" / "completions").mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    return folder


def lay_runs(folder: Path, commands: list[str], but: set[str]) -> None:
    """The runs that commands name, but those that the commands themselves make."""
    named = " ".join(commands)
    for name, sample in RUNS.items():
        if name not in but and name.partition("/")[0] in named:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(folder / "sample_traces" / sample, folder / name)
    shutil.copytree(folder / "docs" / "house-rules", folder / "DIR", dirs_exist_ok=True)
    for gpus in (1, 2, 4, 8) if "1gpu/" in named else ():
        job = play(programs(Job(1, "ddp", gpus, layers=4, steps=4)))
        write_traces(job, gpus, folder / f"{gpus}gpu", Capture())


def run(command: str) -> None:
    """Run one command in the present folder, with the tracedoc of this process where no other one is needed.

    ``tracedoc diagnose`` without arguments is the name of a command: there is one, with a help.
    """
    if re.fullmatch(r"tracedoc \w+|python -m tracedoc", command):
        command += " --help"
    command = re.sub(rf"\b({'|'.join(WORDS)})\b", lambda found: WORDS[found[1]], RANKS.sub(r"\1 2", command))
    # The rules of a checkout are those of its own tracedoc.
    alone = not re.search(r" (>|>>|\|) | rules ", command) and not JOB.match(command)
    if command.startswith("tracedoc ") and alone:
        done = CliRunner().invoke(main, shlex.split(command)[1:])
        status, told = done.exit_code, done.output
    else:
        shell = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
        status, told = shell.returncode, shell.stdout + shell.stderr
    assert status == 0, f"{command}\n{told}"


@pytest.mark.parametrize("document", [one for one in DOCUMENTS if SHORT[one]], ids=name_of)
def test_every_command_runs(document: Path, checkout: Path) -> None:
    lay_runs(checkout, SHORT[document], but=set())
    for command in SHORT[document]:
        run(command)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("document", "number"),
    [
        pytest.param(one, number, id=f"{name_of(one)}: {command}")
        for one in DOCUMENTS
        for number, command in enumerate(RUN_HERE[one])
        if is_long(command)
    ],
)
def test_every_job_runs(document: Path, number: int, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two ranks on CPU, or one without a launcher; then what else the document does with its folder."""
    command, *later = RUN_HERE[document][number:]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in alone.items():
        monkeypatch.setenv(name, value)
    named = re.match(r"tracedoc collect.* (?:-o|--output) (\S+)", command)
    made = named[1] if named else ""
    lay_runs(checkout, [command, *later], but={made, f"{made}/baseline"})
    run(command)
    for other in later:
        if made and made in shlex.split(other) and not is_long(other):
            run(other)


def test_what_is_not_run_is_listed_with_its_reason_and_stands_in_a_document() -> None:
    assert set(NOT_RUN) <= {command for commands in ALL.values() for command in commands}
    by_ci = (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert {f"make {name}" for name in CI} <= set(by_ci)


def test_extras_that_documents_install_are_there() -> None:
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8").split("\n[")
    (optional,) = (part for part in project if part.startswith("project.optional-dependencies]"))
    assert set(EXTRAS) <= set(re.findall(r"^(\w+) = ", optional, re.M))
