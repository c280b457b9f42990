"""The bar of progress: on a terminal only, and drawn by no thread of its own."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from tracedoc.cli.output import progress_on_terminal
from tracedoc.pipeline import ProgressEvent


class Terminal(io.StringIO):
    """A terminal that keeps what is written to it."""

    def isatty(self) -> bool:
        return True


def test_the_bar_says_ranks_and_bytes_and_starts_no_thread(monkeypatch: pytest.MonkeyPatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    threads = threading.active_count()
    with progress_on_terminal() as show:
        assert show is not None
        show(ProgressEvent(done_bytes=3_000_000, total_bytes=4_000_000, done_ranks=1, total_ranks=2))
        assert threading.active_count() == threads
    assert "1 of 2 ranks" in terminal.getvalue()
    assert "3.0/4.0 MB" in terminal.getvalue()


def test_there_is_no_bar_where_no_one_watches(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress_on_terminal() as show:
        assert show is None
