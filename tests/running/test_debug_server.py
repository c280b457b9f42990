"""What a debug server sends becomes a run; what is absent, wrong, slow, cut off or hostile is told."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import pytest

import tracedoc
from tests.cli.test_cli import run as run_command
from tracedoc.errors import InputError
from tracedoc.run.manifest import read_manifest
from tracedoc.running import servers
from tracedoc.running.servers import check_url, receive
from tracedoc.testing import parse_lanes

TRACES = [lanes.to_json() for lanes in parse_lanes("compute 0-60\nallreduce 60-80", ranks=2)]
DUMP = json.dumps({"entries": [], "pg_status": {}}, indent=2)
STACK = 'Thread 0x1 (most recent call first):\n  File "/home/me/train.py", line 12 in <module>\n'


def page(answers: list[str], begin: str, end: str) -> str:
    """A page as torch 2.13 renders it from its templates, for the answers of ranks 0, 1, ..."""
    head = "<!doctype html>\n<nav>\n    <h1>Torch Distributed Debug Server</h1>\n</nav>\n"
    sections = [
        f"\n        <h2>Rank {rank}: http://node{rank}:4000{rank}/handler/x?</h2>\n        "
        + (answer if answer.startswith("<p>") else f"{begin}{answer}{end}")
        for rank, answer in enumerate(answers)
    ]
    return head + "".join(sections) + "\n</section>\n"


def texts(*answers: str) -> str:
    return page(list(answers), "\n            <pre>", "</pre>\n")


def traces(*answers: str) -> str:
    begin = "\n            <script>\n            function run0() {\n                var data = "
    end = ";\n                openPerfetto(data);\n            }\n            </script>\n"
    return page(list(answers), begin, end)


FAILED = "<p>Failed to fetch: status=503</p>\n            <pre>ConnectionError</pre>\n"
Pages = dict[str, str | bytes | Callable[[BaseHTTPRequestHandler], None]]


def healthy() -> Pages:
    return {
        "/stacks": texts(STACK, STACK),
        "/fr_trace_json": texts(DUMP, DUMP),
        "/fr_trace_nccl_json": texts(FAILED, FAILED),
        "/profile?duration=1.5": traces(*TRACES),
    }


@pytest.fixture
def serve() -> Iterator[Callable[[Pages], str]]:
    """Return a function that serves pages on this host until the test ends, and returns the address."""
    servers: list[ThreadingHTTPServer] = []

    def start(pages: Pages) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                content = pages.get(self.path)
                if content is None:
                    self.send_error(404)
                    return
                if callable(content):
                    content(self)
                    return
                self.send_response(200)
                self.end_headers()
                self.wfile.write(content.encode() if isinstance(content, str) else content)

            def log_message(self, *given: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


Serve = Callable[[Pages], str]


def test_all_ranks_of_a_server_become_a_run_that_diagnose_reads(serve: Serve, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    url = serve(healthy())
    shown = run_command("collect", "--from", url, "--seconds", "1.5", "-o", str(folder))
    assert shown.exit_code == 0
    assert "captured 2 of 2 ranks" in shown.stderr
    assert "has no protection" in shown.stderr
    manifest = read_manifest(folder)
    assert manifest is not None
    assert [(one.rank, one.host, one.state) for one in manifest.ranks] == [
        (0, "node0", "complete"),
        (1, "node1", "complete"),
    ]
    assert manifest.ranks[0].part is not None
    assert manifest.ranks[0].part["captured_from"] == {"server": url, "seconds": 1.5}
    assert "steps" in manifest.ranks[0].part["not_known"]  # type: ignore[operator]
    with gzip.open(folder / "rank-1.json.gz", "rt") as file:
        assert file.read() == TRACES[1]
    assert not list(folder.glob("*.flight*"))
    assert tracedoc.diagnose([folder]).run.ranks_seen == (0, 1)


def test_a_rank_that_does_not_answer_costs_itself_only(serve: Serve, tmp_path: Path) -> None:
    pages = healthy() | {"/profile?duration=1.5": traces(TRACES[0], FAILED)}
    first, second = receive(serve(pages), tmp_path, 1.5, 500)
    assert (first.trouble, second.trouble) == ("", "the rank did not answer (status 503)")
    manifest = read_manifest(tmp_path)
    assert manifest is not None
    assert [one.state for one in (*manifest.ranks, *manifest.silent)] == ["complete", "nothing"]


@pytest.mark.parametrize("kept", [1000, 3000])
def test_a_server_that_is_gone_in_the_middle_leaves_what_came(
    serve: Serve, tmp_path: Path, kept: int
) -> None:
    whole = traces(*TRACES)
    place = whole.index("Rank 1") + kept
    pages = healthy() | {"/profile?duration=1.5": whole[:place]}
    first, second = receive(serve(pages), tmp_path, 1.5, 500)
    assert first.trouble == ""
    assert second.trouble == "the server's answer ended in the middle of the trace"
    with gzip.open(tmp_path / "rank-1.json.gz", "rt") as file:
        assert TRACES[1].startswith(file.read().rstrip())
    manifest = read_manifest(tmp_path)
    assert manifest is not None
    assert [one.state for one in manifest.ranks] == ["complete", "partial"]


def test_a_trace_larger_than_asked_for_is_cut_and_the_next_one_read(serve: Serve, tmp_path: Path) -> None:
    pages = healthy() | {"/profile?duration=1.5": traces("[" + "0," * 3_000_000 + "0]", TRACES[1])}
    first, second = receive(serve(pages), tmp_path, 1.5, 1)
    assert "larger than 1 MB" in first.trouble
    assert second.trouble == ""


def test_a_job_that_stands_still_leaves_its_dumps_with_where_its_ranks_are(
    serve: Serve, tmp_path: Path
) -> None:
    waits = {
        "profiling_name": "gloo:all_reduce",
        "process_group": ["0", "default_pg"],
        "collective_seq_id": 7,
        "time_created_ns": 1,
        "state": "scheduled",
        "retired": False,
    }
    inside = json.dumps({"entries": [waits], "pg_status": {}}, indent=2)
    pages = healthy() | {"/fr_trace_json": texts(inside, DUMP)}
    receive(serve(pages), tmp_path, 1.5, 500)
    summary = tracedoc.diagnose([tmp_path]).summary
    assert summary.startswith(
        "The job hung: rank 1 never entered all_reduce 7 of group default_pg; rank 0 waits"
    )
    assert "rank 1 is in <module> (train.py:12)" in summary


def test_no_profiler_is_started_while_a_rank_imports(serve: Serve, tmp_path: Path) -> None:
    importing = '  File "<frozen importlib._bootstrap>", line 1204 in _gcd_import\n' + STACK
    pages = healthy() | {"/stacks": texts(STACK, importing)}
    del pages["/profile?duration=1.5"]
    shown = run_command("collect", "--from", serve(pages), "-o", str(tmp_path / "run"))
    assert (shown.exit_code, "rank 1 imports modules" in shown.stderr) == (2, True)
    assert not (tmp_path / "run").exists()


def redirect(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(302)
    handler.send_header("Location", "http://127.0.0.1:1/elsewhere")
    handler.end_headers()


def damaged_chunks(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    handler.wfile.write(b"zz\r\n")


@pytest.mark.parametrize(
    ("pages", "why"),
    [
        ({}, "status 404"),
        ({"/stacks": damaged_chunks}, "damaged"),
        ({"/stacks": "<html>Grafana</html>"}, "not as PyTorch's debug server does"),
        ({"/stacks": redirect}, "status 302"),
        ({"/stacks": texts(STACK) + texts(STACK)}, "one twice"),
        ({"/stacks": "<h2>Rank x: </h2>"}, "names no rank"),
        ({"/stacks": b"\xff\xfe" * 1000 + b"<h2>Rank 9999999: </h2>"}, "names no rank"),
    ],
)
def test_other_servers_and_hostile_ones_are_refused(
    serve: Serve, tmp_path: Path, pages: Pages, why: str
) -> None:
    with pytest.raises(InputError, match=why):
        receive(serve(pages), tmp_path, 1.5, 500)
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_sends_without_end_is_left(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "SECONDS_TO_ANSWER", 0.2)

    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            while True:
                handler.wfile.write(b"x" * 100_000)
        except OSError:
            pass

    with pytest.raises(InputError, match="took too long"):
        receive(serve({"/stacks": drip}), tmp_path, 1.5, 500)


def test_a_server_that_says_nothing_is_left(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "SECONDS_TO_ANSWER", 0.1)
    monkeypatch.setattr(servers, "SECONDS_TO_CONNECT", 0.1)
    over = Event()
    url = serve({"/stacks": lambda handler: over.wait(30) and None})
    with pytest.raises(InputError, match="timed out"):
        receive(url, tmp_path, 1.5, 500)
    over.set()


def test_a_port_where_nobody_listens_is_told(serve: Serve, tmp_path: Path) -> None:
    shown = run_command("collect", "--from", "http://127.0.0.1:9", "-o", str(tmp_path / "run"))
    assert shown.exit_code == 2
    assert "does not answer" in shown.stderr


@pytest.mark.parametrize(
    "url",
    ["https://a:1", "http://", "a:25999", "http://a:x", "http://u:p@a:1", "http://a:1/profile", "file:///a"],
)
def test_only_plain_addresses_of_servers_are_taken(url: str) -> None:
    with pytest.raises(InputError, match="no address"):
        check_url(url)
    assert check_url("http://node0") == ("node0", 25999)
