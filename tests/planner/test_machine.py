"""What was measured on a machine takes the place of the table's rates, for the same GPUs alone."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.collector.conftest import run_alone
from tracedoc.planner.hardware import (
    Cluster,
    Gathered,
    Machine,
    find_gpu,
    keep,
    kept_in,
    link_of,
    measured_gpu,
    on_this_machine,
    this_machine,
)
from tracedoc.planner.plan import plan
from tracedoc.planner.setup import PlanRequest, Question, Training
from tracedoc.planner.shape import shape_from_parameters

A100 = Machine(
    "node7", "2026-11-02", "NVIDIA A100 80GB PCIe", 84.97e9, 234.0, 1600.0,
    (Gathered(4, 20.0, 30e-6), Gathered(8, 10.0, 50e-6)),
)  # fmt: skip


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path


def cluster(name: str) -> Cluster:
    gpu = find_gpu(name)
    return Cluster(gpu, link_of(gpu), None)


def test_a_machine_is_kept_for_its_host(home: Path) -> None:
    assert this_machine() is None
    assert keep(A100) == kept_in()
    assert kept_in().is_relative_to(home)
    assert this_machine() == A100
    kept_in().write_text("{")
    assert this_machine() is None


def test_measured_rates_take_the_place_of_the_tables() -> None:
    """234 of 312 TFLOP/s is 75 %, of 77 in the table; 20 GB/s among four GPUs, 10 among eight."""
    keep(A100)
    found, notes = on_this_machine(cluster("A100 PCIe 80GB"), keeps_link=False)
    assert found.gpu is not None
    assert found.gpu.matmul == pytest.approx(0.75)
    assert found.gpu.attention == pytest.approx(0.51 * 0.75 / 0.77)
    assert found.gpu.hbm_gbps == 1600.0
    assert found.inside is not None
    assert (found.inside.reached(4), found.inside.reached(8)) == (20.0, 10.0)
    assert found.inside.latency_us == pytest.approx(50)
    assert notes == ("Products, memory and link as measured on node7 on 2026-11-02.",)
    given, _ = on_this_machine(cluster("A100 PCIe 80GB"), keeps_link=True)
    assert given.inside == cluster("A100 PCIe 80GB").inside


def test_other_gpus_are_planned_from_the_table() -> None:
    keep(A100)
    assert on_this_machine(cluster("H100"), keeps_link=False) == (cluster("H100"), ())
    assert measured_gpu(msgspec.structs.replace(A100, device="a GPU of the future")) is None


def test_a_plan_on_measured_rates_is_slower_where_they_are() -> None:
    question = Question(shape_from_parameters(7_000_000_000), Training(), 8, 1, 84.97e9)
    steps = []
    for tflops in (234.0, 117.0):
        keep(msgspec.structs.replace(A100, product_tflops=tflops))
        found, _ = on_this_machine(cluster("A100 PCIe 80GB"), keeps_link=False)
        first = plan(question, PlanRequest(found)).strategies[0]
        assert first.step is not None
        steps.append(first.step.compute_ms)
        assert first.step.worst_ms <= 1.51 * first.step.best_ms
    assert 1.7 < steps[1] / steps[0] < 2.0  # what is bound by memory stays


def test_two_processes_measure_on_their_cpus(home: Path, tmp_path: Path) -> None:
    """The very functions, with sizes that take no time: what they measure means nothing here."""
    pytest.importorskip("torch", reason="torch is not installed (make loaders)")
    script = tmp_path / "measured.py"
    script.write_text(
        "import os, torch\n"
        "from functools import partial\n"
        "from tracedoc.cli.plan import measure as m\n"
        "m.MODEL_WIDTH = m.MLP_WIDTH = m.TOKENS['cpu'] = 32\n"
        "m.COPIED_BYTES, m.GATHERED_BYTES, m.LATENCY_BYTES = 1 << 16, 1 << 18, 1 << 10\n"
        "m.PRODUCT_SECONDS = 0.0\n"
        "rank = int(os.environ['RANK'])\n"
        "os.environ['LOCAL_RANK'] = str(rank)\n"
        "meet = partial(torch.distributed.init_process_group, rank=rank, world_size=2)\n"
        "torch.distributed.init_process_group = partial(meet, init_method=os.environ['MEETING'])\n"
        "print(m.measured(), end='')\n"
    )
    meeting = f"file://{tmp_path / 'meeting'}"
    ranks = run_alone({"measured": ([str(script)], 2)}, tmp_path, LOCAL_WORLD_SIZE="2", MEETING=meeting)
    first, second = ranks["measured"]
    assert "cpu: products " in first.output, first.output
    assert "products" not in second.output
    machine = this_machine()
    assert machine is not None
    assert [one.gpus for one in machine.gathered] == [2]
    assert machine.product_tflops > 0


def test_a_plan_without_a_gpu_is_for_the_cpus_that_were_measured() -> None:
    """0.1 TFLOP/s for 6 FLOPs of 100M parameters and 512 tokens: 3 s, less the embedding."""
    keep(Machine("node7", "2026-11-02", "cpu", 16e9, 0.1, 20.0, (Gathered(2, 1.5, 400e-6),)))
    gpu = measured_gpu()
    assert gpu is not None
    found, notes = on_this_machine(Cluster(gpu, link_of(gpu), None), keeps_link=False)
    assert found.inside is not None
    assert (found.inside.title, found.inside.reached(2)) == ("gloo in a CPU's memory", 1.5)
    training = Training(precision="fp32", sequence=512)
    answer = plan(Question(shape_from_parameters(100_000_000), training, 2, 1, 16e9), PlanRequest(found))
    assert notes
    assert answer.recommended == "ddp"
    step = answer.strategies[0].step
    assert step is not None
    assert 2500 < step.compute_ms < 3100
    assert step.width <= 1.51
