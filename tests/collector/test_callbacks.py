"""What callbacks log, read back from what real trackers wrote offline."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.collector.conftest import run_alone
from tests.known_runs import diagnosis_of
from tracedoc.callbacks import log
from tracedoc.diagnosis import Diagnosis
from tracedoc.diagnosis_json import from_json

JOB = Path(__file__).with_name("callbacks_job.py")
TRACKERS = ("wandb", "mlflow", "tensorboard")

trackers = pytest.mark.skipif(
    not all(map(find_spec, ("torch", *TRACKERS))), reason="the trackers are not installed"
)


def ran(kind: str, folder: Path, *, ranks: int = 1) -> list[str]:
    """Run a job to its end; return what each rank wrote."""
    ended = run_alone({kind: ([str(JOB), kind, str(folder)], ranks)}, folder, KINETO_LOG_LEVEL="99")[kind]
    assert [rank.code for rank in ended] == [0] * ranks, ended
    return [rank.output for rank in ended]


def diagnosis_in(folder: Path) -> Diagnosis:
    return from_json((folder / "run" / "diagnosis.json").read_bytes())


def check_wandb(folder: Path, diagnosis: Diagnosis) -> None:
    """The page and the ledger as media, the answer in the run's own file."""
    (run,) = (folder / "wandb").glob("offline-run-*")
    (page,) = run.glob("files/media/html/tracedoc/page*.html")
    assert diagnosis.findings[0].title in page.read_text(encoding="utf-8") if diagnosis.findings else True
    (ledger,) = run.glob("files/media/table/tracedoc/ledger*.json")
    table = json.loads(ledger.read_text(encoding="utf-8"))
    assert diagnosis.ledger is not None
    shares = [row[table["columns"].index("share_ms")] for row in table["data"]]
    assert shares == pytest.approx([cause.share_ms for cause in diagnosis.ledger.causes])
    (kept,) = run.glob("*.wandb")
    assert b"tracedoc/answer" in kept.read_bytes()


def check_mlflow(folder: Path, diagnosis: Diagnosis) -> None:
    (answer,) = (folder / "mlflow").glob("*/*/tags/tracedoc.answer")
    run = answer.parents[1]
    assert answer.read_text(encoding="utf-8") == diagnosis.summary
    _, value, _ = (run / "metrics" / "tracedoc" / "step_ms").read_text(encoding="utf-8").split()
    assert diagnosis.ledger is not None
    assert float(value) == pytest.approx(diagnosis.ledger.step_ms)
    kept = from_json((run / "artifacts" / "tracedoc" / "diagnosis.json").read_bytes())
    assert kept.summary == diagnosis.summary
    assert (run / "artifacts" / "tracedoc" / "page.html").is_file()


def check_tensorboard(folder: Path, diagnosis: Diagnosis) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (page,) = folder.rglob("tracedoc.html")
    events = EventAccumulator(str(page.parent))
    events.Reload()
    assert diagnosis.ledger is not None
    told = {f"tracedoc/{cause.id}_ms": cause.share_ms for cause in diagnosis.ledger.causes}
    told |= {"tracedoc/step_ms": diagnosis.ledger.step_ms, "tracedoc/ideal_ms": diagnosis.ledger.ideal_ms}
    found = {tag: events.Scalars(tag)[-1].value for tag in events.Tags()["scalars"] if "tracedoc" in tag}
    assert found == pytest.approx(told, rel=1e-5)
    (text,) = events.Tensors("tracedoc/answer/text_summary")
    first = diagnosis.summary.partition(" ")[0]  # the rest is escaped, and broken into paragraphs
    assert f"### {first}" in text.tensor_proto.string_val[0].decode()


def check(folder: Path) -> None:
    diagnosis = diagnosis_in(folder)
    assert diagnosis.ledger is not None
    check_wandb(folder, diagnosis)
    check_mlflow(folder, diagnosis)
    check_tensorboard(folder, diagnosis)


@trackers
def test_a_loop_logs_once_to_all_trackers_that_its_first_rank_opened(tmp_path: Path) -> None:
    said = ran("loop", tmp_path, ranks=2)
    assert not any("tracedoc" in text for text in said)
    assert diagnosis_in(tmp_path).run.ranks_seen == (0, 1)
    check(tmp_path)


@pytest.mark.soak
@trackers
@pytest.mark.parametrize(("kind", "package"), [("trainer", "transformers"), ("lightning", "lightning")])
def test_a_trainer_logs_where_it_reports_to(kind: str, package: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    assert "tracedoc" not in ran(kind, tmp_path)[0]
    check(tmp_path)


def test_a_capture_without_a_step_costs_the_training_nothing(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    first, second = ran("short", tmp_path, ranks=2)
    assert "is not logged: error: nothing was captured" in first
    assert "tracedoc" not in second


class Writer:
    """What TensorBoard's writer has."""

    def __init__(self, folder: Path) -> None:
        self.log_dir = str(folder)
        self.scalars: dict[str, float] = {}
        self.texts: list[str] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars[name] = value

    def add_text(self, name: str, text: str, step: int) -> None:
        self.texts.append(text)

    def flush(self) -> None:
        pass


def test_shares_that_are_logged_add_up_to_the_step(sample_traces: Path, tmp_path: Path) -> None:
    diagnosis = diagnosis_of(sample_traces / "synthetic_zero3_gather_stall")
    writer = Writer(tmp_path)
    assert log(diagnosis, writer, object(), writer) == ("tensorboard",)
    step_ms = writer.scalars.pop("tracedoc/step_ms")
    assert sum(writer.scalars.values()) == pytest.approx(step_ms)
    assert len(writer.texts) == 1
    logged = writer.texts[0] + (tmp_path / "tracedoc.html").read_text(encoding="utf-8")
    assert str(sample_traces) not in logged
