"""Capture a job that runs already: by a server in it, or by the watch that the collector left in it."""

from __future__ import annotations

import shutil
from datetime import datetime
from pathlib import Path
from urllib.parse import urlsplit

from tracedoc.cli.output import say
from tracedoc.errors import InputError

OTHER = "dynolog"


def capture_from(server: str, output: str | None, seconds: float, max_mb: float, job_id: int) -> Path:
    """Capture from PyTorch's debug server or dynolog's daemon, and return the run directory.

    Raises :class:`InputError` where nothing was captured; the folder is then gone again.
    """
    from tracedoc.run.manifest import read_parts, write_manifest
    from tracedoc.running import debug_server

    is_daemon = server == OTHER or server.startswith(f"{OTHER}:")
    if not is_daemon:
        debug_server.check_url(server)
    folder = _new_folder(output, server)
    try:
        if is_daemon:
            _from_daemon(server, folder, seconds, job_id)
        else:
            debug_server.receive(server, folder, seconds, max_mb)
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
    from tracedoc.running import dynolog

    try:
        parts = urlsplit(server)
        host, port = parts.hostname or "localhost", parts.port or dynolog.PORT
    except ValueError:
        raise InputError(
            f"{server} is no address of a daemon", "write dynolog or dynolog://HOST:1778"
        ) from None
    pids = dynolog.trigger(host, port, folder, seconds, job_id)
    say(f"tracedoc: dynolog triggered {len(pids)} processes")
    dynolog.gather(host, folder, pids, seconds)


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
        raise InputError(f"the job takes no steps{words}", f"to see it again: tracedoc diagnose {target}")
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
