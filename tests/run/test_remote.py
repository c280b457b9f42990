"""Traces in object stores and on web servers are read like those on disk, and only where they are named."""

from __future__ import annotations

import gzip
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tracedoc.errors import InputError
from tracedoc.pipeline import Options, diagnose
from tracedoc.run.discover import discover
from tracedoc.run.remote import is_remote, open_remote, public_name, remote_size

RUN = "synthetic_ddp_tiny_batch"
HERE = Options(jobs=1)


@pytest.fixture
def memory(sample_traces: Path) -> Iterator[Any]:
    """Yield fsspec's store in memory, holding a run at memory://bucket/run."""
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
    filesystem = fsspec.filesystem("memory")
    for path in (sample_traces / RUN).glob("*.json.gz"):
        filesystem.pipe(f"/bucket/run/{path.name}", path.read_bytes())
    yield filesystem
    filesystem.rm("/bucket", recursive=True)


@pytest.fixture
def server(sample_traces: Path, tmp_path: Path) -> Iterator[tuple[str, list[int]]]:
    """Yield the address of a web server on this machine that serves a folder with a run, and what it sent."""
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    shutil.copytree(sample_traces / RUN, tmp_path / "run")

    sent: list[int] = []

    class Quiet(SimpleHTTPRequestHandler):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, directory=str(tmp_path), **kwargs)

        def do_HEAD(self) -> None:
            self.refused() or super().do_HEAD()

        def do_GET(self) -> None:
            self.refused() or super().do_GET()

        def refused(self) -> bool:
            """Answer /refused with a status, and /broken with less than was announced."""
            if self.path.startswith("/refused"):
                self.send_error(403)
            elif self.path.startswith("/broken"):
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                self.wfile.write(b'{"traceEvents": [')
            else:
                return False
            return True

        def copyfile(self, source: Any, outputfile: Any) -> None:
            with suppress(ConnectionError):
                while block := source.read(1 << 16):
                    outputfile.write(block)
                    sent.append(len(block))

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}", sent
        running.shutdown()
        thread.join()


def budgets(paths: list[str]) -> list[object]:
    return [rank.steps for rank in diagnose(paths, HERE).ranks]


def test_a_folder_in_a_store_reads_like_one_on_disk(memory: Any, sample_traces: Path):
    assert budgets(["memory://bucket/run"]) == budgets([str(sample_traces / RUN)])
    assert [file.rank_hint for file in discover(["memory://bucket/run"]).files] == [0, 1, 2, 3]


def test_a_file_in_a_store_may_be_named(memory: Any):
    found = diagnose(["memory://bucket/run/rank-1.json.gz"], HERE)
    assert found.run.sources == ("memory://bucket/run/rank-1.json.gz",)


def test_a_manifest_in_a_store_tells_ranks(memory: Any):
    memory.pipe("/bucket/run/manifest.json", b'{"schema": 1, "ranks": {"7": {"file": "rank-3.json.gz"}}}')
    files = discover(["memory://bucket/run"]).files
    assert [file.manifest_rank for file in files] == [None, None, None, 7]


def test_folders_in_a_store_are_looked_into(memory: Any):
    memory.pipe("/bucket/deep/rank5/trace.json", b'{"traceEvents": []}')
    memory.pipe("/bucket/deep/rank5/trace2.json.tmp", b"{")
    (file,) = discover(["memory://bucket/deep"]).files[:1]
    assert file.path.endswith("bucket/deep/rank5/trace.json")
    assert file.rank_hint == 5


def test_a_file_on_a_web_server_reads_like_one_on_disk(server: tuple[str, list[int]], sample_traces: Path):
    local = [str(sample_traces / RUN / f"rank-{rank}.json.gz") for rank in (0, 1)]
    assert budgets([f"{server[0]}/run/rank-{rank}.json.gz" for rank in (0, 1)]) == budgets(local)


def test_a_list_of_links_is_a_folder(server: tuple[str, list[int]]):
    assert [file.rank_hint for file in discover([f"{server[0]}/run/"]).files] == [0, 1, 2, 3]


def test_a_large_file_is_streamed(server: tuple[str, list[int]], tmp_path: Path):
    address, sent = server
    size = 64 << 20
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(size)
    with open_remote(f"{address}/large.json") as stream:
        assert stream.read(10) == bytes(10)
    assert sum(sent) < size
    with open_remote(f"{address}/large.json") as stream:
        assert sum(iter(lambda: len(stream.read(1 << 20)), 0)) == size


def test_what_is_absent_is_an_error_with_a_hint(memory: Any, server: tuple[str, list[int]]):
    for path in ("memory://bucket/absent.json", f"{server[0]}/absent.json", "memory://bucket/empty"):
        with pytest.raises(InputError, match="was not found") as caught:
            diagnose([path], HERE)
        assert caught.value.hint
    memory.mkdir("/bucket/nothing")
    with pytest.raises(InputError, match="holds no traces"):
        diagnose(["memory://bucket/nothing"], HERE)


def test_what_a_server_refuses_or_breaks_off_is_told_as_such(server: tuple[str, list[int]]):
    with pytest.raises(InputError, match="cannot be read: the server answered 403 Forbidden"):
        diagnose([f"{server[0]}/refused/rank-0.json"], HERE)
    with pytest.raises(InputError, match="the connection broke off before the end") as caught:
        diagnose([f"{server[0]}/broken/rank-0.json"], HERE)
    assert caught.value.hint.startswith("try again")


def test_a_login_that_is_missing_is_an_error(memory: Any, monkeypatch: pytest.MonkeyPatch):
    class NoCredentialsError(Exception):
        pass

    def info(path: str, **_: Any) -> dict[str, Any]:
        # Stores import what they raise when they are first asked.
        monkeypatch.setitem(sys.modules, "botocore.exceptions", module)
        raise NoCredentialsError("Unable to locate credentials")

    module = ModuleType("botocore.exceptions")
    module.BotoCoreError = NoCredentialsError  # type: ignore[attr-defined]
    monkeypatch.setattr(memory, "info", info)
    with pytest.raises(InputError, match="cannot be read: NoCredentialsError"):
        remote_size("memory://bucket/run/rank-0.json.gz")


def test_what_is_no_url_is_an_error():
    with pytest.raises(InputError, match="a URL cannot be understood"):
        discover(["https://[::1/rank-0.json"])


def test_a_damaged_remote_file_costs_its_rank_only(memory: Any):
    memory.pipe("/bucket/run/rank-1.json.gz", gzip.compress(b"{}"))
    found = diagnose(["memory://bucket/run"], HERE)
    (limit,) = [limit for limit in found.limits if limit.code == "unread-file"]
    assert "bucket/run/rank-1.json.gz" in limit.message


def test_passwords_and_signatures_in_a_url_are_not_shown():
    assert public_name("https://me:secret@host:8000/run/rank-0.json?X-Signature=abc#x") == (
        "https://host:8000/run/rank-0.json"
    )
    assert public_name("runs/a?b") == "runs/a?b"


def test_paths_of_this_machine_are_not_remote():
    assert not any(map(is_remote, ("-", "runs/a", "/runs/a", "C:\\runs\\a", "C:/runs", "rank-0.json.gz")))


def test_without_fsspec_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(InputError, match="s3://") as caught:
        discover(["s3://bucket/run"])
    assert caught.value.hint == "in a checkout of tracedoc: pip install '.[remote]'"


def test_an_unknown_scheme_is_an_error():
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    with pytest.raises(InputError, match="nowhere://"):
        discover(["nowhere://bucket/run"])
