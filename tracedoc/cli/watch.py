"""``tracedoc watch``: follow a job that runs, and have it captured, by a server in it or by the collector."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import click

from tracedoc.cli.completion import files, folders
from tracedoc.cli.output import quiet_option, say, text_width
from tracedoc.errors import InputError, TracedocError

if TYPE_CHECKING:
    from tracedoc.running.watch import JobWatch

SECONDS_SILENT = 30.0
STILL = 10
"""A job stands still that takes no step for so many seconds and ten usual ones."""

SECONDS_BETWEEN_CAPTURES = 600.0
"""Drift that comes and goes is not captured more often."""


@click.command(short_help="Follow a running job by its step logs.")
@click.argument("run", metavar="RUN", shell_complete=folders)
@click.option("--prometheus", metavar="FILE", shell_complete=files, help="Keep a textfile for node-exporter.")
@click.option(
    "--on-drift",
    type=click.Choice(["tell", "capture"]),
    default="tell",
    show_default=True,
    help="When steps get slower: say so, or capture and diagnose too.",
)
@click.option(
    "--every", type=click.FloatRange(min=0.1), default=10.0, show_default=True, metavar="S",
    help="Off a terminal, say how it goes so often.",
)  # fmt: skip
@quiet_option
def watch(run: str, prometheus: str | None, on_drift: str, every: float) -> None:
    """Follow a running job by the step logs that the collector keeps.

    RUN is the folder of `tracedoc collect`. Nothing is asked of the job
    until its steps get 5 % slower than in its first hour. Then ranks that take
    requests (TRACEDOC_LIVE=1) tell who comes late, or are captured again.
    The watch ends with the job.

    \b
    Examples:
      tracedoc watch runs/a
      tracedoc watch runs/a --on-drift capture
      tracedoc watch runs/a --prometheus /var/lib/node_exporter/tracedoc.prom
    """
    follow(Path(run), (prometheus and Path(prometheus)) or None, on_drift == "capture", every)


def follow(folder: Path, metrics: Path | None, capture: bool, every: float) -> None:
    """Follow a run until its job ends; raises :class:`InputError` for a folder without step logs."""
    from tracedoc.run.manifest import LEAST_SECONDS_BETWEEN_LOOKS, SECONDS_BETWEEN_LOOKS
    from tracedoc.running.watch import JobWatch, write_metrics

    shown = _Shown(every)
    logs: dict[int, Path] = {}
    drift = _Drift(folder, shown, capture=capture)
    told_still = False
    while True:
        found, ended = _logs(folder)
        if not found:
            shown.line("no step yet")
            time.sleep(SECONDS_BETWEEN_LOOKS)
            continue
        if found != logs:  # ranks that came later, or a job that was started again
            logs, job = found, JobWatch(found)
        job.look()
        shown.line(job.words)
        if metrics is not None:
            try:
                write_metrics(job, folder.name, metrics)
            except OSError as error:
                raise InputError(
                    f"{metrics} cannot be written: {error.strerror}", "name another file"
                ) from None
        still = _stands_still(job) and not ended
        if still and not told_still:
            shown.event(f"no step for {time.time() - job.slowest.end_ns / 1e9:.0f} s")
            for line in _who(folder, job):
                shown.event(line)
        told_still = still
        drift.tell(job)
        if ended:
            shown.event(f"the job has ended; {job.words}")
            return
        # Logs are read as often as steps come; what else may change is looked at once a second.
        step_s = max(job.slowest.now_ns / 1e9, LEAST_SECONDS_BETWEEN_LOOKS)
        looks = max(int(SECONDS_BETWEEN_LOOKS / step_s), 1)
        for _ in range(looks - 1):
            time.sleep(SECONDS_BETWEEN_LOOKS / looks)
            job.look()
            drift.tell(job)
        time.sleep(SECONDS_BETWEEN_LOOKS / looks)


class _Drift:
    """Tells drift once, and again where steps take 1.5 times what was told; captures then, if asked."""

    def __init__(self, folder: Path, shown: _Shown, *, capture: bool) -> None:
        self._folder, self._shown, self._capture = folder, shown, capture
        self._told_ns = self._next_capture = 0.0

    def tell(self, job: JobWatch) -> None:
        from tracedoc.running.watch import SLOW

        one = job.slowest
        if not one.drift:
            self._told_ns = 0.0
        elif one.now_ns > SLOW * self._told_ns:
            self._told_ns = one.now_ns
            self._shown.event(job.drift_words)
            for line in _who(self._folder, job):
                self._shown.event(line)
            if self._capture and time.monotonic() >= self._next_capture:
                self._next_capture = time.monotonic() + SECONDS_BETWEEN_CAPTURES
                _capture(self._folder, self._shown)


class _Shown:
    """What stands on the terminal: a line that changes, and lines that stay."""

    def __init__(self, every: float) -> None:
        self._every, self._said = every, 0.0
        self._clear = "\r\033[K" if sys.stdout.isatty() else ""

    def line(self, words: str) -> None:
        if self._clear:
            click.echo(f"{self._clear}{words[: text_width() - 1]}", nl=False)
        elif time.monotonic() - self._said >= self._every:
            self._said = time.monotonic()
            click.echo(words)

    def event(self, words: str) -> None:
        click.echo(f"{self._clear}{time.strftime('%H:%M:%S')}  {words}")


def _logs(folder: Path) -> tuple[dict[int, Path], bool]:
    """The step logs of the ranks, none before the first, and whether the job has ended.

    Raises :class:`InputError` where there are none and will be none.
    """
    from tracedoc.run.manifest import is_running, read_parts
    from tracedoc.running.ask import newest_ranks

    parts = read_parts(folder)
    ranks = [part for part in newest_ranks(parts) if part.get("step_log")]
    nodes = [part for part in parts if part.get("part") == "node"]
    host = socket.gethostname()
    ended = bool(nodes) and all(node.get("ended") for node in nodes)
    # A launcher that was killed says nothing; one that starts a job again has no ranks for a while.
    ended = ended or not any(
        part.get("host") != host or is_running(int(str(part.get("pid", 0)))) for part in (*nodes, *ranks)
    )
    if not ranks and ended:
        raise InputError(f"{folder} has no step log", "give the folder of a job under `tracedoc collect`")
    return {int(str(part["rank"])): folder / Path(str(part["step_log"])).name for part in ranks}, ended


def _stands_still(job: JobWatch) -> bool:
    one = job.slowest
    idle_s = time.time() - one.end_ns / 1e9
    return one.end_ns > 0 and idle_s > max(SECONDS_SILENT, STILL * one.usual_ns / 1e9)


def _who(folder: Path, job: JobWatch) -> list[str]:
    """What the ranks' flight recorders say: who comes late, or who is missing."""
    from tracedoc.run.hang import read_standstill
    from tracedoc.running.ask import ask, wait_for_dumps

    slowest = job.slowest
    try:
        request, ranks = ask(folder, warmup=0, active=0)
        dumps = wait_for_dumps(folder, request, ranks, slowest.now_ns / 1e9)
        one_clock = len({part.get("host") for part in ranks}) == 1
        found = read_standstill(dumps, len(job.ranks), one_clock=one_clock, since_ns=slowest.since_ns)
    except TracedocError as error:
        return [f"who is late is not known: {error.message}"]
    # They tell of this moment, and would be taken for those of a hang.
    shutil.rmtree(folder / request.folder, ignore_errors=True)
    if _stands_still(job):
        return found.lines
    return [found.late.words] if found.late is not None else ["no rank enters collectives late"]


def _capture(folder: Path, shown: _Shown) -> None:

    try:
        target = capture_again(str(folder), warmup=1, active=5)
    except TracedocError as error:
        shown.event(f"not captured: {error.message}")
        return
    sys.stdout.flush()
    subprocess.run([sys.executable, "-m", "tracedoc", "diagnose", os.fspath(target)], check=False)


OTHER = "dynolog"


def capture_from(server: str, output: str | None, seconds: float, max_mb: float, job_id: int) -> Path:
    """Capture from PyTorch's debug server or dynolog's daemon, and return the run directory.

    Raises :class:`InputError` where nothing was captured; the folder is then gone again.
    """
    from tracedoc.run.manifest import read_parts, write_manifest
    from tracedoc.running import servers

    is_daemon = server == OTHER or server.startswith(f"{OTHER}:")
    if not is_daemon:
        servers.check_url(server)
    folder = _new_folder(output, server)
    try:
        if is_daemon:
            _from_daemon(server, folder, seconds, job_id)
        else:
            servers.receive(server, folder, seconds, max_mb)
            say(
                f"tracedoc: {server} has no protection: whoever reaches its port, and those of its ranks, "
                "can read stacks and profile the job; keep them closed to other hosts"
            )
        ranks = read_parts(folder)
        for part in ranks:
            if part.get("reason"):
                say(f"tracedoc: rank {part['rank']}: {part['state']}: {part['reason']}")
        if not any(part.get("file") for part in ranks) and not list(folder.glob("*.flight")):
            raise InputError(f"{server} gave no trace", "the lines above say why, rank by rank")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    manifest = write_manifest(folder)
    say(f"tracedoc: captured {len(manifest.ranks)} of {len(ranks)} ranks, {seconds:g} s, in {folder}")
    return folder


def _new_folder(output: str | None, server: str) -> Path:
    host = urlsplit(server).hostname or "localhost"
    folder = Path(
        output or f"tracedoc-runs/{datetime.now():%Y%m%d-%H%M%S}-{host.replace(':', '_')}"
    ).absolute()
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise InputError(f"{folder} exists already", "name a new folder with -o, or leave -o out") from None
    except OSError as error:
        raise InputError(
            f"{folder} cannot be made: {error.strerror}", "name another folder with -o"
        ) from None
    return folder


def _from_daemon(server: str, folder: Path, seconds: float, job_id: int) -> None:
    from tracedoc.running import servers

    try:
        parts = urlsplit(server)
        host, port = parts.hostname or "localhost", parts.port or servers.PORT
    except ValueError:
        raise InputError(
            f"{server} is no address of a daemon", "write dynolog or dynolog://HOST:1778"
        ) from None
    pids = servers.trigger(host, port, folder, seconds, job_id)
    say(f"tracedoc: dynolog triggered {len(pids)} processes")
    servers.gather(host, folder, pids, seconds)


def capture_again(run: str, warmup: int, active: int) -> Path:
    """Have the ranks of a running job capture again, and return the folder of that capture.

    Raises :class:`InputError` where nobody answers; the message says what flight recorders tell of a job that
    stands still.
    """
    from tracedoc.run.flight import find_dumps
    from tracedoc.run.hang import read_standstill
    from tracedoc.run.manifest import read_manifest
    from tracedoc.running import ask

    folder = Path(run).absolute()
    request, ranks = ask.ask(folder, warmup=warmup, active=active)
    target = folder / request.folder
    say(f"tracedoc: asked {len(ranks)} ranks for {active} steps from step {request.at} on")
    goes_on = ask.wait_for(folder, request, ranks)
    if not goes_on:
        dumps = find_dumps(target)
        words = f": {'; '.join(read_standstill(dumps).lines)}" if dumps else ""
        raise InputError(f"the job stands still{words}", f"to see it again: tracedoc diagnose {target}")
    for path in target.glob("*.flight*"):
        path.unlink()  # of calls that have ended since
    for part in ranks:
        name = str(part.get("step_log"))
        if (folder / name).is_file() and "/" not in name:
            shutil.copyfile(folder / name, target / name)
    # The ranks may write to their parts still: they are merged by who reads them.
    manifest = read_manifest(target)
    assert manifest is not None
    for entry in (*manifest.ranks, *manifest.silent):
        if entry.reason:
            say(f"tracedoc: rank {entry.rank}: {entry.state}: {entry.reason}")
    if not manifest.ranks:
        raise InputError("nothing was captured", "the lines above say why, rank by rank")
    say(f"tracedoc: captured {len(manifest.ranks)} of {len(ranks)} ranks in {target}")
    return target
