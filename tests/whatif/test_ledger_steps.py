"""What captured steps that differ cost on average."""

from __future__ import annotations

import numpy as np
import pytest

import tracedoc
from tests.simulated.spec import Fault, Job
from tests.simulated.traces import Capture, write_traces
from tests.simulated.truth import Truth
from tests.whatif.test_ledger import PRODUCT, ledger_of, of, one_of, reduced
from tracedoc.play.run_replay import RunReplay
from tracedoc.testing import TraceBuilder
from tracedoc.whatif.ledger_steps import mean_error
from tracedoc.whatif.predictions import run_replay


def test_a_rank_that_is_late_in_some_steps_costs_what_it_costs_on_average(tmp_path):
    """Of six complete steps, two hold 15 ms more: 5 ms of the mean step, none of the analysed one."""
    ledger = ledger_of(tmp_path, reduced(late_ms=15.0, sometimes=3), steps=7)
    assert ledger.step_ms == pytest.approx(106.0, abs=0.2)
    assert of(ledger, "ranks.") == pytest.approx(5.0, abs=0.5)
    assert of(ledger, "slow_steps") == 0.0


def test_one_like_it_stands_for_a_step_that_cannot_be_played(tmp_path):
    """Every other of four steps holds 15 ms more; the first waits for work that was not captured."""
    ledger_of(tmp_path, reduced(late_ms=15.0, sometimes=2), steps=5)
    replay = run_replay(tracedoc.measure([tmp_path]).measurements.run)
    assert isinstance(replay, RunReplay)
    assert sorted(one.step for one in replay.steps) == [0, 1, 2, 3]
    assert replay.mean_ms == pytest.approx(108.5, abs=0.2)


@pytest.mark.parametrize("missing", [(), (0,)])
def test_pauses_of_a_rank_in_some_steps_cost_what_they_cost_on_average(tmp_path, missing):
    """While a rank is away, its own step is long; for those that wait it is the next one."""
    job = Job(3, "ddp", ranks=4, steps=6, jitter=0.0, faults=(Fault("pauses", 2, 40.0),))
    truth = Truth(job)
    write_traces(truth.played, job.ranks, tmp_path, Capture(missing=missing))
    found = tracedoc.diagnose(tmp_path)
    true = truth.gain_of_fault("pauses")
    assert true > 0.05 * truth.step_ms
    assert of(found.ledger, "slow_steps") == 0.0
    late = one_of(found.ledger, "ranks.host")
    assert late.alone_ms[1] == pytest.approx(true, abs=0.03 * truth.step_ms)
    assert late.ranks == (2,)


def test_a_step_far_longer_than_the_others_is_told_by_itself(tmp_path):
    """Both hosts are away for 60 ms before one of four complete steps ends: 15 ms of the mean."""

    def draw(builder: TraceBuilder, rank: int, index: int, start: float) -> float:
        end = start + (110.0 if index == 2 else 50.0)
        builder.kernel(PRODUCT, start, start + 40.0, launch_ms=start - 0.01)
        builder.kernel(PRODUCT, end - 10.0, end, launch_ms=end - 10.01)
        builder.runtime("cudaDeviceSynchronize", end - 9.9, end + 0.01)
        return end

    ledger = ledger_of(tmp_path, draw)
    slow = one_of(ledger, "slow_steps")
    assert ledger.step_ms == pytest.approx(66.0, abs=0.2)
    assert slow.share_ms == pytest.approx(15.0, abs=0.2)
    assert slow.place == "step 2"


def test_pauses_of_different_lengths_cost_their_mean(tmp_path):
    """Hosts are away for 10, 5, 10 and 15 ms of the complete steps: 10 ms of the mean one."""

    def draw(builder: TraceBuilder, rank: int, index: int, start: float) -> float:
        end = start + 50.0 + (10.0, 5.0, 10.0, 15.0, 10.0)[index]
        builder.kernel(PRODUCT, start, start + 40.0, launch_ms=start - 0.01)
        builder.kernel(PRODUCT, end - 10.0, end, launch_ms=end - 10.01)
        builder.runtime("cudaDeviceSynchronize", end - 9.9, end + 0.01)
        return end

    ledger = ledger_of(tmp_path, draw)
    assert ledger.step_ms == pytest.approx(61.0, abs=0.1)
    assert of(ledger, "slow_steps") == 0.0
    low, likely, high = one_of(ledger, "host.pause").alone_ms
    assert likely == pytest.approx(10.0, abs=0.2)
    assert low < likely - 1.0
    assert high > likely + 1.0  # four steps leave open what the mean of many is


def test_a_step_played_for_all_tells_of_others_as_far_as_its_kinds_of_time_are_alike(tmp_path):
    """The GPU idles for 1.0, 1.4, 1.0 and 1.4 ms of 51: by 0.23 around 1.2, four steps are sure to 0.27.

    Of half of that time it is half as much, and of all that the compute takes no more.
    """
    builder, start = TraceBuilder(), 1.0
    for index in range(5):
        end = start + 51.0 + 0.4 * (index % 2)
        builder.kernel(PRODUCT, start, start + 50.0, launch_ms=start - 0.01)
        builder.runtime("cudaDeviceSynchronize", start + 0.02, start + 50.01)
        builder.step(index, start - 0.02, end - 0.03)
        start = end
    builder.write(tmp_path / "rank-0.json")
    replay = run_replay(tracedoc.measure([tmp_path]).measurements.run)
    assert isinstance(replay, RunReplay)
    assert not replay.others
    assert [replay.mean_error_ms(ms) for ms in (0.6, -1.2, 30.0)] == pytest.approx(
        [0.136, 0.271, 0.271], abs=0.005
    )


def test_each_rank_shows_by_how_much_steps_differ():
    """By 1.41 around 2 and around 12: of two steps the mean is known to 6.31 times 1 of one, 2.92 of two."""
    one, two = np.array([1.0, 3.0]), np.array([[1.0, 3.0], [13.0, 11.0]])
    assert (mean_error(one), mean_error(two), mean_error(one[:1])) == pytest.approx((6.31, 2.92, 0.0))
