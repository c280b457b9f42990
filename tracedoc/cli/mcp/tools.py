"""What an agent may ask: each tool calls what a command calls, and gives the same numbers and words."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock
from typing import BinaryIO, Literal

import msgspec

import tracedoc
from tracedoc.cli.explain import meanings_of
from tracedoc.cli.mcp.answers import (
    Answer,
    brief,
    critical_path,
    ledger_lines,
    limits_of,
    predictions,
    whole,
    window_of,
)
from tracedoc.cli.reading import run_or_diagnosis
from tracedoc.diagnosis import Diagnosis
from tracedoc.errors import InputError
from tracedoc.glossary import limits
from tracedoc.report.texts import redacted
from tracedoc.report.view import View, build_view, is_guard
from tracedoc.run.remote import is_remote

DEEPEST = 3
"""Folders of a run lie at most so deep: those of TensorBoard."""

LONGEST_RUN_S = 3600.0
"""A command that is captured is ended after this time."""

SECONDS_FOR_THE_JOB = 30.0
"""How long a command may take to end its job."""

MOST_CHANGES = 20
"""Changes that one question may play; a run has fewer."""

KEPT_BYTES = 1 << 20
TOLD_LINES, TOLD_LETTERS = 20, 4_000
"""Last lines of what a command wrote that are told, and letters of them."""


class Folders:
    """The folders that may be read, links followed; relative paths begin at the first."""

    def __init__(self, allowed: Sequence[str]) -> None:
        self.roots = [Path(folder).resolve() for folder in allowed]
        for root in self.roots:
            if not root.is_dir():
                raise InputError(f"{root} is no folder", "name the folders that may be read")

    def path(self, given: str) -> Path:
        """Where a path leads; :class:`InputError` for one outside, and for a folder with a link to there."""
        if given == "-" or is_remote(given):
            raise InputError(f"{given} is no file of this machine", self._hint())
        try:
            real = (self.roots[0] / given).resolve()
            real.exists()
        except (OSError, ValueError, RuntimeError):  # too long, with a zero byte, links in a circle
            raise InputError(f"{given[:80]} is no path", self._hint()) from None
        if not self._allowed(real) or not all(map(self._allowed, _links(real))):
            raise InputError(f"{given} leads out of what may be read", self._hint())
        return real

    def _allowed(self, path: Path) -> bool:
        return any(path == root or root in path.parents for root in self.roots)

    def _hint(self) -> str:
        return f"allowed: {', '.join(map(str, self.roots))}"


def _links(folder: Path) -> Iterator[Path]:
    """Where the links of a folder and its subfolders lead."""
    for at, inner, names in os.walk(folder):
        for name in (*inner, *names):
            if os.path.islink(path := os.path.join(at, name)):
                yield Path(path).resolve()
        if len(Path(at).relative_to(folder).parts) >= DEEPEST:
            inner.clear()


def _state(path: Path) -> tuple[tuple[str, int, int], ...]:
    """The files of a run with size and time of change: what an answer that is kept was made of."""
    found = [path] if path.is_file() else [*path.glob("*"), *path.glob("*/*")]
    about = ((str(one), one.stat()) for one in sorted(found) if one.is_file())
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in about)


class Tools:
    """The tools of one server. One of them works at a time, whatever the client asks at once."""

    def __init__(
        self, allowed: Sequence[str], *, redact: bool, is_client_gone: Callable[[], bool] = lambda: False
    ) -> None:
        self._folders = Folders(allowed)
        self._redact = redact
        self._is_client_gone = is_client_gone
        self._working = Lock()
        self._kept = lru_cache(maxsize=4)(lambda path, state: run_or_diagnosis(path, _options()))
        self.looking: tuple[Callable[..., Answer], ...] = (
            self.diagnose, self.finding, self.ledger, self.facts, self.timeline,
            self.whatif, self.compare, self.plan, self.explain,
        )  # fmt: skip
        self.running: tuple[Callable[..., Answer], ...] = (self.collect, self.try_)

    def _diagnosis(self, run: str) -> Diagnosis:
        path = self._folders.path(run)
        with self._working:
            return self._kept(str(path), _state(path))

    def _view(self, run: str) -> View:
        return build_view(self._diagnosis(run), redact=self._redact)

    def diagnose(self, run: str) -> Answer:
        """Say why a training run is slow: first line, what each cause costs, findings with fixes, and limits.

        `run` is a folder of traces (one a rank), a trace, or a saved diagnosis (.json or page).
        """
        view = self._view(run)
        return {
            "answer": view.diagnosis.summary,
            "run": view.run,
            "throughput": view.throughput,
            "what_costs_the_step": ledger_lines(view),
            "findings": [brief(one) for one in view.findings],
            "plan": view.diagnosis.plan,
            "not_in_the_plan": view.unplanned,
            "budgets": view.diagnosis.budgets,
            "limits": limits_of(view),
        }

    def finding(self, run: str, rule_id: str) -> Answer:
        """Tell all of one finding: reasoning, places in the traces, every fix with code, and its prediction.

        `rule_id` is that of a finding or of any other rule, which then says why it found nothing, or a cause.
        """
        view = self._view(run)
        causes = view.diagnosis.ledger.causes if view.diagnosis.ledger is not None else ()
        about = [one for one in causes if one.id == rule_id or rule_id in one.told_by]
        names = {rule_id, *(rule for one in about if one.id == rule_id for rule in one.told_by)}
        guards = [one for one in view.diagnosis.findings if is_guard(one) and one.rule_id in names]
        answer = {
            "findings": [whole(one) for one in view.findings if one.finding.rule_id in names],
            "about_the_capture": guards,
            "verdicts": [one for one in view.diagnosis.verdicts if one.rule_id in names],
            "causes": about,
        }
        if not any(answer.values()):
            meanings_of(rule_id)  # says the nearest name
            raise InputError(f"{rule_id} is no rule or cause of this run", "diagnose lists its findings")
        return answer | {"limits": limits_of(view)}

    def ledger(self, run: str) -> Answer:
        """List what each cause costs the mean captured step, and the critical path of the analysed one.

        `share_ms` add up to step_ms - ideal_ms; `alone_ms` is what mending only this cause gives.
        """
        view = self._view(run)
        ledger, replay = view.diagnosis.ledger, view.diagnosis.replay
        reason = "this result has no ledger" if ledger is None else ledger.reason
        path = critical_path(replay) if replay is not None else {}
        return {"reason": reason, "ledger": ledger, "critical_path": path, "limits": limits_of(view)}

    def facts(self, run: str, names: Sequence[str] = (), topic: str = "", by_rank: bool = False) -> Answer:
        """Give measured values with units, or why one is unknown: those of `names`, or all of a `topic`.

        `by_rank` adds the value of each rank or group. Without names and topic the topics are listed.
        """
        from tracedoc.topics import by_topic

        view = self._view(run)
        known = view.diagnosis.facts
        topics = by_topic([*known])
        wanted = [*names, *topics.get(topic, ())]
        for name in names:
            if name not in known:
                meanings_of(name)
        if topic and topic not in topics:
            raise InputError(f"there is no topic {topic}", f"topics: {', '.join(topics)}")
        found = {
            name: msgspec.to_builtins(known[name]) | ({} if by_rank else {"values": {}})
            for name in dict.fromkeys(wanted)
            if name in known
        }
        rows = [{"name": name} | record for name, record in found.items()]
        return {"facts": rows, "topics": {} if wanted else topics, "limits": limits_of(view)}

    def timeline(self, run: str, rank: int, start_ns: int | None = None, end_ns: int | None = None) -> Answer:
        """Show a window of one rank's trace: its budget, idle time by cause, and its longest GPU events.

        Times count from the rank's first event, as those of findings' evidence. Without a window it is the
        analysed step.
        """
        diagnosis = self._diagnosis(run)
        reports = {report.rank: report for report in diagnosis.ranks}
        if rank not in reports:
            raise InputError(f"rank {rank} is not in this run", f"its ranks: {', '.join(map(str, reports))}")
        source = self._folders.path(reports[rank].source)
        with self._working:
            seen = tracedoc.build_timeline(tracedoc.load(str(source)))
        return window_of(seen, start_ns, end_ns) | {"limits": limits_of(self._view(run))}

    def whatif(self, run: str, changes: Sequence[str] = ()) -> Answer:
        """Predict the step after changes as "compile-model" or "faster-link by=2": each alone, all together.

        Without changes, list those that this run can be replayed with, and why others cannot.
        """
        path = str(self._folders.path(run))
        limits = limits_of(self._view(run))
        if len(changes) > MOST_CHANGES:
            raise InputError(f"{len(changes)} changes are too many", f"ask for {MOST_CHANGES} at most")
        with self._working:
            if changes:
                found = tracedoc.predict(path, [*changes], _options())
                return predictions(found) | {"limits": limits}
            from tracedoc.whatif.answer import list_changes

            names = ("change", "parameters", "does", "not_applicable")
            listed = list_changes(tracedoc.measure(path, _options()).measurements.run)
        rows = [dict(zip(names, row, strict=True)) for row in sorted(listed, key=lambda row: bool(row[3]))]
        return {"changes": rows, "limits": limits}

    def compare(
        self,
        base: str,
        head: str,
        scaling: Literal["", "weak", "strong"] = "",
        samples_per_step: tuple[float, float] | None = None,
    ) -> Answer:
        """Say what changed from one run to another: verdict, which causes grew, and what differs.

        `scaling` is for runs on different numbers of GPUs: the same batch per GPU (weak) or in all (strong).
        """
        from tracedoc.report.comparison_sheet import comparison_sheet

        sides = [self._diagnosis(run) for run in (base, head)]
        sides = [redacted(side) for side in sides] if self._redact else sides
        found = tracedoc.compare(*sides, scaling=scaling or None, samples_per_step=samples_per_step)
        sheet = comparison_sheet(found)
        rest = msgspec.to_builtins(found)
        limits = [
            {"side": side} | limit
            for side, run in (("base", base), ("head", head))
            for limit in limits_of(self._view(run))
        ]
        compared = {name: rest[name] for name in rest if name not in ("base", "head")}
        return {"answer": sheet.answer, "notes": sheet.notes} | compared | {"limits": limits}

    def plan(
        self,
        run: str = "",
        params: str = "",
        model: str = "",
        gpus: int | None = None,
        gpu: str = "",
        options: Mapping[str, str | int | float | bool] | None = None,
    ) -> Answer:
        """Say which training strategy fits, its predicted step and memory, and how to configure it.

        The model is that of a captured `run`, has `params` such as "7B", or is in `model`, a config.json.
        `options` are others of `tracedoc plan`, as {"nodes": 2, "seq": 4096, "lora_rank": 16}.
        """
        from tracedoc.cli.plan.question import Options, question_of
        from tracedoc.planner.plan import plan as make_plan

        given = {"params": params, "gpus": gpus, "gpu_name": gpu, **(options or {})}
        given |= {name: str(self._folders.path(at)) for name, at in (("run", run), ("config", model)) if at}
        given = {name: value for name, value in given.items() if value not in ("", None)}
        for name in given:
            if name not in Options.__struct_fields__ or name in ("script", "report_format", "outputs"):
                raise InputError(f"a plan has no option {name}", "tracedoc plan --help lists them")
        try:
            question, request, notes = question_of(msgspec.convert(given, Options, strict=False))
        except msgspec.ValidationError as error:
            raise InputError(f"the options cannot be read: {error}", "tracedoc plan --help") from None
        answer = make_plan(question, request, notes=notes)
        rest: Answer = msgspec.to_builtins(answer)
        units = (
            "memory in bytes on the GPU that needs most; a layout in ranks, micro-batches and rounds a step"
        )
        return {"answer": rest.pop("summary"), "units": units} | rest

    def explain(self, name: str) -> Answer:
        """Explain a rule, fact, cause, limit or word of an answer: meaning, thresholds, fixes."""
        return dict(meanings_of(name))

    def collect(
        self,
        folder: str,
        command: Sequence[str] = (),
        server: str = "",
        wait: int = 5,
        active: int = 5,
        to_end: bool = False,
    ) -> Answer:
        """Capture a few steps of every rank: of a training command that is run here, or of a job that runs.

        `command` is a list of words, as ["torchrun", "--nproc-per-node", "2", "train.py"]; it is ended when
        `folder` has its capture, unless it shall run `to_end`. Of a job that runs, `server` is the address of
        its debug server, or dynolog; without both, `folder` is its run, and its ranks are asked again.
        Then ask diagnose for the `run` of the answer.
        """
        into = self._folders.path(folder)
        words = ["collect", "--active", str(active)]
        if command:
            words += ["--wait", str(wait), *(() if to_end else ("--exit-after-capture",))]
            words += ["-o", str(into), "--", *command]
        elif server:
            words = ["collect", "--from", server, "-o", str(into)]
        else:
            words += ["--again", str(into)]
        code, written, told = self._run(words)
        if "--again" in words:
            into = max(into.glob("again-*"), key=os.path.getmtime, default=into)
        return {"exit_code": code, "run": str(into), "output": _told(written), "said": _told(told)}

    def try_(
        self, run: str, fixes: Sequence[str] = (), command: Sequence[str] = (), minutes: float = 10
    ) -> Answer:
        """Start the job of a captured run again with its fixes, in turns with itself: what each gives.

        A fix is a rule_id, one of its fixes as "tiny-batch/0", or code as "DataLoader(num_workers=4)";
        without any, the first three that can be. `command` is the job's, where the run does not keep it.
        """
        words = ["try", str(self._folders.path(run)), *fixes, "--budget", f"{60 * minutes:g}s", "-f", "json"]
        code, written, told = self._run([*words, *(("--", *command) if command else ())])
        if not written.startswith("{"):
            raise InputError(_told(told) or f"exit code {code}", "finding tells each fix, and what it needs")
        found = msgspec.json.decode(written)
        names = ("fix", "title", "why")
        rows = [dict(zip(names, row, strict=True)) for row in found.pop("left_out")]
        return {**found, "cannot_be_tried": rows}

    def _run(self, words: Sequence[str]) -> tuple[int, str, str]:
        """Exit code of a command of ours, and the ends of what it wrote and said.

        It is asked to end after :data:`LONGEST_RUN_S`, and where the client is gone.
        """
        until = time.monotonic() + LONGEST_RUN_S
        with TemporaryFile() as written, TemporaryFile() as told:
            job = subprocess.Popen(
                [sys.executable, "-m", "tracedoc", *words],
                cwd=self._folders.roots[0],
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=told,
                start_new_session=True,
            )
            while job.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    job.wait(1.0)
                if time.monotonic() > until or self._is_client_gone():
                    job.terminate()
                    with suppress(subprocess.TimeoutExpired):
                        job.wait(SECONDS_FOR_THE_JOB)
                    with suppress(ProcessLookupError):
                        os.killpg(job.pid, signal.SIGKILL)
            return job.returncode, _end_of(written), _end_of(told)


def _end_of(file: BinaryIO) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - KEPT_BYTES))
    return file.read().decode(errors="replace")


def _told(text: str) -> str:
    return "\n".join(text[-TOLD_LETTERS:].splitlines()[-TOLD_LINES:])


def _options() -> tracedoc.Options:
    return tracedoc.Options(cache=True)


def _rules() -> list[Answer]:
    from tracedoc.judge.rule_cache import kept_rules

    return [
        {name: getattr(rule, name) for name in ("id", "title", "topic", "status", "cause")}
        for rule in kept_rules(())
    ]


def _schema() -> object:
    return msgspec.json.decode((files("tracedoc") / "schema" / "diagnosis-2.json").read_bytes())


DOCUMENTS: Mapping[str, tuple[str, Callable[[], object]]] = {
    "schema": ("JSON schema of a diagnosis: every field and what it means", _schema),
    "rules": ("Every rule: id, title, topic, status, and the causes that it names", _rules),
    "limits": ("What each limit of a capture means, by its code", limits),
}
"""What a client may read beside the tools: the words about each, and what gives it."""
