"""What each cause costs the step, on traces whose answer is worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tracedoc
from tests.play.fluid import Simulation
from tests.play.jobs import draw_job
from tracedoc.diagnosis_json import from_json, to_json
from tracedoc.ledger import CAUSE_WORDS, Ledger, LedgerCause
from tracedoc.pipeline import Options
from tracedoc.testing import TraceBuilder
from tracedoc.whatif.ledger import alone_of, make_ledger
from tracedoc.whatif.ledger_entries import Entry, Weights, find_pairs, related, split_by_size
from tracedoc.whatif.ledger_steps import StepsApart

MIB = 1 << 20
PRODUCT = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_tn"
"""A matrix product on tensor cores."""
UPDATE = "void multi_tensor_apply_kernel<FusedAdam>()"

Draw = Callable[[TraceBuilder, int, int, float], float]
"""Draws the step with a number of a rank, which begins at a time, and returns when it ends, in ms."""


def ledger_of(folder: Path, draw: Draw, *, ranks: int = 2, steps: int = 5) -> Ledger:
    """The ledger of a job; the host waits for the end of each step, and 1 ms passes to the next one."""
    for rank in range(ranks):
        builder, start = TraceBuilder(rank, ranks), 1.0
        for index in range(steps):
            end = draw(builder, rank, index, start)
            builder.step(index, start - 0.5, end + 0.4)
            start = end + 1.0
        builder.write(folder / f"rank-{rank}.json")
    answer = tracedoc.predict([folder], options=Options(jobs=1))
    assert answer.ledger is not None
    assert_adds_up(answer.ledger)
    return answer.ledger


def assert_adds_up(ledger: Ledger) -> None:
    shares = sum(one.share_ms for one in ledger.causes)
    assert shares == pytest.approx(ledger.step_ms - ledger.ideal_ms, abs=0.005 * max(ledger.step_ms, 1e-9))
    assert [one.share_ms for one in ledger.causes] == sorted(
        (one.share_ms for one in ledger.causes), reverse=True
    )
    for one in ledger.causes:
        low, likely, high = one.alone_ms
        assert 0 <= low <= likely <= high
        assert one.last_ms >= 0
        assert one.share_ms >= 0
        assert one.id in CAUSE_WORDS


def of(ledger: Ledger, *ids: str) -> float:
    """What causes cost together, by the beginnings of their ids."""
    return sum(one.share_ms for one in ledger.causes if one.id.startswith(ids))


def one_of(ledger: Ledger, name: str) -> LedgerCause:
    return next(one for one in ledger.causes if one.id == name)


def reduced(late_ms: float = 0.0, sometimes: int = 1) -> Draw:
    """60 ms of compute, then an all-reduce of 40 ms; rank 1 computes longer in every so many steps."""

    def draw(builder: TraceBuilder, rank: int, index: int, start: float) -> float:
        late = late_ms if index % sometimes == 0 else 0.0
        mine = start + 60.0 + (late if rank == 1 else 0.0)
        end = start + 100.0 + late
        builder.kernel(PRODUCT, start, mine, launch_ms=start - 0.01)
        builder.backward(start + 0.02, start + 0.1)
        builder.collective("allreduce", mine, end, nbytes=64 * MIB, launch_ms=start + 0.03)
        builder.runtime("cudaDeviceSynchronize", start + 0.2, end + 0.01)
        return end

    return draw


def test_communication_that_nothing_hides_is_the_rest_of_the_step(tmp_path):
    ledger = ledger_of(tmp_path, reduced())
    assert ledger.step_ms == pytest.approx(101.0, abs=0.1)
    assert of(ledger, "link.", "order.") == pytest.approx(40.0, abs=0.3)
    assert ledger.ideal_ms == pytest.approx(60.0, abs=1.5)
    assert ledger.unexplained_ms == pytest.approx(0.0, abs=0.1)


def test_a_rank_that_computes_longer_costs_its_excess(tmp_path):
    """Rank 1 computes 75 ms, rank 0 60: mended, the step is 15 ms shorter, whatever else is mended."""
    late = one_of(ledger_of(tmp_path, reduced(late_ms=15.0)), "ranks.compute")
    assert late.share_ms == pytest.approx(15.0, abs=0.3)
    assert late.alone_ms[1] == pytest.approx(15.0, abs=0.1)
    assert late.last_ms == pytest.approx(15.0, abs=0.1)
    assert late.ranks == (1,)


def test_late_ranks_that_hide_each_other_share_what_both_cost(tmp_path):
    """Rank 1 computes 20 ms longer, rank 2 begins 20 ms later: mending one gives nothing, both 20 ms.

    Without the wait at the end of the step the host of rank 2 would run ahead, and not be late.
    """

    def draw(builder: TraceBuilder, rank: int, index: int, start: float) -> float:
        begin, end = start + (20.0 if rank == 2 else 0.0), start + 100.0
        mine = begin + (80.0 if rank == 1 else 60.0)
        builder.kernel(PRODUCT, begin, mine, launch_ms=begin - 0.01)
        builder.collective("allreduce", mine, end, nbytes=64 * MIB, launch_ms=begin + 0.03)
        builder.runtime("cudaDeviceSynchronize", begin + 0.2, end + 0.01)
        return end

    ledger = ledger_of(tmp_path, draw, ranks=3)
    late = [one_of(ledger, name) for name in ("ranks.compute", "ranks.host")]
    assert [(one.ranks, one.partner) for one in late] == [((1,), "ranks.host"), ((2,), "ranks.compute")]
    for one in late:
        assert (one.share_ms, one.alone_ms[1]) == pytest.approx((10.0, 0.0), abs=0.5)


def test_collections_of_garbage_are_no_pause_of_unknown_code(tmp_path):
    """The host collects for 10 of 61 ms, between two kernels of 20 and 30 ms."""

    def draw(builder: TraceBuilder, rank: int, index: int, start: float) -> float:
        builder.kernel(PRODUCT, start, start + 20.0, launch_ms=start - 0.01)
        builder.host("Python GC", start + 0.1, start + 30.0, category="user_annotation")
        builder.kernel(PRODUCT, start + 30.01, start + 60.0, launch_ms=start + 30.0)
        builder.runtime("cudaDeviceSynchronize", start + 30.1, start + 60.01)
        return start + 60.0

    ledger = ledger_of(tmp_path, draw)
    assert one_of(ledger, "host.gc").alone_ms[1] == pytest.approx(10.0, abs=0.2)
    assert of(ledger, "host.pause") == 0.0


def test_pageable_copies_cost_the_copy_and_the_wait_for_it(tmp_path):
    """The host waits 20 ms for the batch, on the stream of compute, before it launches 50 ms of compute."""

    def draw(builder: TraceBuilder, rank: int, index: int, start: float) -> float:
        builder.loader(start - 0.4, start - 0.3)
        builder.copy("HtoD", start, start + 20.0, pageable=True, stream=7, launch_ms=start - 0.01)
        builder.kernel(PRODUCT, start + 20.02, start + 70.0, launch_ms=start + 20.01)
        builder.runtime("cudaDeviceSynchronize", start + 20.05, start + 70.01)
        return start + 70.0

    ledger = ledger_of(tmp_path, draw)
    assert one_of(ledger, "input.copies").share_ms == pytest.approx(20.0, abs=0.5)
    assert one_of(ledger, "input.copies").alone_ms[1] == pytest.approx(20.0, abs=0.3)


def test_a_loader_in_the_training_process_costs_its_time(tmp_path):
    def draw(builder: TraceBuilder, rank: int, index: int, start: float) -> float:
        builder.loader(start, start + 30.0)
        builder.kernel(PRODUCT, start + 30.01, start + 80.0, launch_ms=start + 30.0)
        builder.runtime("cudaDeviceSynchronize", start + 30.05, start + 80.01)
        return start + 80.0

    ledger = ledger_of(tmp_path, draw)
    assert one_of(ledger, "input.wait").alone_ms[1] == pytest.approx(30.0, abs=0.3)


def test_workers_that_keep_up_in_some_steps_only_still_take_as_long_for_a_batch(tmp_path):
    """40 ms of compute behind a wait for workers of 12 or 8 ms in turn, the latter as if they kept up."""

    def draw(builder: TraceBuilder, rank: int, index: int, start: float) -> float:
        begin = start + (8.0 if index % 2 else 12.0)
        builder.loader(start, begin, workers=2)
        builder.kernel(PRODUCT, begin + 0.01, begin + 40, launch_ms=begin)
        builder.runtime("cudaDeviceSynchronize", begin + 0.05, begin + 40.01)
        return begin + 40.0

    ledger = ledger_of(tmp_path, draw, ranks=1)
    assert one_of(ledger, "input.wait").alone_ms[1] == pytest.approx(10.0, abs=1.0)
    assert ledger.unexplained_ms == pytest.approx(0.0, abs=1.0)


def host_paced(pause_ms: float = 0.0, freed_ms: float = 0.0, waits: int = 0) -> Draw:
    """40 launches, one each ms, of kernels that take 0.1 ms; what else the host does comes in the middle."""

    def draw(builder: TraceBuilder, rank: int, index: int, start: float) -> float:
        at = start
        for number in range(40):
            if number == 20:
                at += pause_ms
                if freed_ms:
                    builder.runtime("cudaMalloc", at - 0.5, at - 0.5 + freed_ms)
                    at += freed_ms
            builder.kernel(PRODUCT, at + 0.01, at + 0.11, launch_ms=at)
            if number < waits:
                builder.runtime("cudaStreamSynchronize", at + 0.05, at + 0.12)
            at += 1.0
        builder.runtime("cudaDeviceSynchronize", at - 0.9, at - 0.88)
        return at - 0.88

    return draw


def test_launches_at_their_pace_cost_what_the_device_does_not_need(tmp_path):
    """40 kernels of 0.1 ms need 4 ms."""
    ledger = ledger_of(tmp_path, host_paced())
    assert of(ledger, "host.launch") == pytest.approx(ledger.step_ms - 4.1, rel=0.05)


def test_a_pause_of_the_host_is_no_launching(tmp_path):
    """The host is away for 30 ms: more than 20 launch intervals of 1 ms.

    Without it the step is 30 ms shorter; were launches free, the 4 ms of the device would hide as much of it.
    """
    pause = one_of(ledger_of(tmp_path, host_paced(pause_ms=30.0)), "host.pause")
    assert pause.alone_ms[1] == pytest.approx(30.0, abs=0.3)
    assert pause.last_ms == pytest.approx(26.0, abs=0.3)
    assert pause.share_ms == pytest.approx(28.0, abs=0.7)


def test_memory_that_is_allocated_in_the_step_costs_the_calls(tmp_path):
    allocator = one_of(ledger_of(tmp_path, host_paced(freed_ms=25.0)), "host.allocator")
    assert allocator.alone_ms[1] == pytest.approx(25.0, abs=0.5)


def test_waiting_for_the_device_keeps_the_host_from_running_ahead(tmp_path):
    """Host 10 ms, device 10 ms, one after the other; without the wait they overlap: 10 ms a step."""

    def draw(builder: TraceBuilder, rank: int, index: int, start: float) -> float:
        builder.kernel(PRODUCT, start + 10.0, start + 20.0, launch_ms=start + 9.99)
        builder.runtime("cudaStreamSynchronize", start + 10.05, start + 20.01)
        builder.kernel(PRODUCT, start + 20.1, start + 20.2, launch_ms=start + 20.09)
        return start + 20.0

    sync = one_of(ledger_of(tmp_path, draw), "host.sync")
    assert sync.alone_ms[1] == pytest.approx(10.0, abs=0.5)
    assert sync.last_ms == pytest.approx(0.0, abs=0.2)


def test_what_the_host_does_right_after_a_wait_may_be_for_what_it_read(tmp_path):
    """Device 10 ms, then 13.8 ms of the host before it launches again: 24 ms a step.

    Without the wait the host is the limit: 13.8 ms, and 0.4 to launch and to wait. If the 13.8 ms go with it,
    or alone, the device is: 10 ms.
    """

    def draw(builder: TraceBuilder, rank: int, index: int, start: float) -> float:
        for one in range(10):
            builder.kernel(PRODUCT, start + one, start + one + 1, launch_ms=start - 0.2 + 0.02 * one)
        builder.runtime("cudaStreamSynchronize", start + 0.05, start + 10.01)
        return start + 23.0

    ledger = ledger_of(tmp_path, draw, ranks=1)
    assert one_of(ledger, "host.sync").alone_ms == pytest.approx((9.8, 9.8, 14.0), abs=0.2)
    assert one_of(ledger, "host.pause").alone_ms == pytest.approx((13.8, 13.8, 13.8), abs=0.2)
    (fix,) = tracedoc.predict([tmp_path], ["no-sync"]).alone
    assert fix.gain_ms == pytest.approx((9.8, 9.8, 14.0), abs=0.2)
    away, wait = tracedoc.diagnose([tmp_path], Options(jobs=1)).findings[:2]
    assert (away.rule_id, wait.rule_id) == ("host-away", "blocking-syncs")
    assert "in stream.synchronize()" in wait.says


def test_a_wait_right_before_a_pause_may_go_with_it(tmp_path):
    """The host launches for 4 ms, waits for the last 6 of the device, and is away for 10: 20 ms a step.

    Without the pause it is 10; if the host waits only for what it looks at then, the device limits it: 6.8.
    """

    def draw(builder: TraceBuilder, rank: int, index: int, start: float) -> float:
        for one in range(40):
            at = start + 0.1 * one
            builder.kernel(PRODUCT, at + 0.01, at + 0.03, launch_ms=at)
        builder.kernel(PRODUCT, start + 4.01, start + 10.01, launch_ms=start + 4)
        builder.runtime("cudaStreamSynchronize", start + 4.05, start + 10.02)
        return start + 19.0

    pause = one_of(ledger_of(tmp_path, draw, ranks=1), "host.pause")
    assert pause.alone_ms == pytest.approx((9.9, 9.9, 13.2), abs=0.2)


def test_what_a_late_rank_pauses_longer_may_be_the_same_code(tmp_path):
    """Every rank is away for 10 ms before it reduces, and rank 1 for 20 ms more: of it at best all 30 go."""

    def draw(builder: TraceBuilder, rank: int, index: int, start: float) -> float:
        for one in range(40):
            at = start + 0.1 * one
            builder.kernel(PRODUCT, at + 0.01, at + 0.03, launch_ms=at)
        called = start + 14.0 + 20.0 * rank
        builder.collective("allreduce", called + 0.01, start + 35.0, nbytes=MIB, launch_ms=called)
        builder.runtime("cudaStreamSynchronize", called + 0.05, start + 35.01)
        return start + 35.0

    pause = one_of(ledger_of(tmp_path, draw), "host.pause")
    assert pause.alone_ms == pytest.approx((9.9, 9.9, 29.9), abs=0.3)


def test_two_limits_of_equal_length_hide_each_other(tmp_path):
    """Launches take 40 ms, communication beside them 40, compute 4: either alone gives nothing, both 36."""

    def draw(builder: TraceBuilder, rank: int, index: int, start: float) -> float:
        builder.backward(start - 0.2, start - 0.1)
        builder.collective("allreduce", start, start + 40.0, nbytes=64 * MIB, launch_ms=start - 0.15)
        at = start
        for _ in range(40):
            builder.kernel(PRODUCT, at + 0.01, at + 0.11, launch_ms=at)
            at += 1.0
        builder.optimizer(at + 0.01, at + 0.2)
        builder.kernel(UPDATE, at + 0.05, at + 0.1, launch_ms=at + 0.02)
        builder.runtime("cudaDeviceSynchronize", at + 0.11, at + 0.12)
        return at + 0.12

    ledger = ledger_of(tmp_path, draw)
    launches = one_of(ledger, "host.launch")
    assert launches.alone_ms[1] < 2.0
    assert launches.share_ms > 14.0
    assert of(ledger, "link.") > 14.0
    assert launches.partner.startswith("link.")


def partners_of(entries, gains):
    pairs = find_pairs(entries, step_ms=100.0)
    partners, _ = related(SimpleNamespace(gains=gains), entries, pairs)
    return partners


def test_the_partner_of_a_cause_is_what_hides_it_and_not_what_gives_most():
    """Launches and the link give 36 ms only together; input gives 60 ms, with or without either."""
    alone = {"host.launch": 0.0, "link.transfer": 0.0, "input.wait": 60.0}

    def gains(lists):
        names = [{one.name for one in removals} for removals in lists]
        hidden = {"host.launch", "link.transfer"}
        return [sum(alone[name] for name in asked) + (36.0 if hidden <= asked else 0.0) for asked in names]

    shares = {"host.launch": 18.0, "link.transfer": 18.0, "input.wait": 60.0}
    entries = [
        Entry(name, share, Weights(alone[name], share), (SimpleNamespace(name=name),))
        for name, share in shares.items()
    ]
    assert partners_of(entries, gains) == {
        "host.launch": "link.transfer",
        "link.transfer": "host.launch",
    }


@pytest.mark.parametrize(
    ("alone_ms", "both_ms", "partners"),
    [
        # Alone the link gives less than half of its share, and 12 ms more with launches: these hide it.
        (0.0, 24.0, {"link.transfer": "host.launch"}),
        # Alone it gives more than half of its share: what more it gives with launches hides nothing.
        (11.0, 35.0, {}),
        # With launches it gives less than half of its share more: they do not hide it.
        (0.0, 20.0, {}),
    ],
)
def test_a_cause_hides_behind_what_is_worth_half_of_its_share(alone_ms, both_ms, partners):
    """Launches give 12 ms alone, of a share of 18; the share of the link is 20 ms."""
    alone = {"host.launch": 12.0, "link.transfer": alone_ms}

    def gains(lists):
        return [both_ms if len(removals) > 1 else alone[removals[0].name] for removals in lists]

    shares = {"host.launch": 18.0, "link.transfer": 20.0}
    entries = [
        Entry(name, share, Weights(alone[name], share), (SimpleNamespace(name=name),))
        for name, share in shares.items()
    ]
    assert partners_of(entries, gains) == partners


def test_two_causes_cost_the_same_time_where_both_give_little_more_than_one():
    """Launches or syncs give 20 ms, both 22, so that each has 11; what costs little is apart."""
    alone = {"host.launch": 20.0, "host.sync": 20.0, "input.wait": 4.0}

    def gains(lists):
        names = [{one.name for one in removals} for removals in lists]
        assert not any("input.wait" in asked for asked in names)
        return [22.0] * len(names)

    shares = {"host.launch": 11.0, "host.sync": 11.0, "input.wait": 4.0}
    entries = [
        Entry(name, share, Weights(alone[name], share), (SimpleNamespace(name=name),))
        for name, share in shares.items()
    ]
    pairs = find_pairs(entries, step_ms=100.0)
    partners, sharers = related(SimpleNamespace(gains=gains), entries, pairs)
    assert not partners
    assert sharers == {"host.launch": "host.sync", "host.sync": "host.launch"}


def test_parts_of_a_step_that_is_shorter_than_its_replay_are_scaled_to_it(tmp_path, monkeypatch):
    """Causes of 55 ms, of which 40 are communication, in steps of 33 ms: each keeps three fifths."""
    whole = ledger_of(tmp_path, reduced(late_ms=15.0))
    short = StepsApart(33.0, (1, 2, 3))
    monkeypatch.setattr("tracedoc.whatif.ledger.steps_apart", lambda *_: short)
    ledger = tracedoc.predict([tmp_path], options=Options(jobs=1)).ledger
    assert ledger is not None
    assert (ledger.step_ms, ledger.ideal_ms) == (33.0, pytest.approx(0.0, abs=1e-6))
    scale = 33.0 / (whole.step_ms - whole.ideal_ms)
    assert of(ledger, "ranks.") == pytest.approx(of(whole, "ranks.") * scale, rel=1e-6)
    assert sum(one.share_ms for one in ledger.causes) == pytest.approx(33.0)


@pytest.mark.parametrize("seed", range(6))
def test_causes_together_give_at_least_what_each_gives(tmp_path, seed):
    run = tracedoc.measure(
        [Simulation(draw_job(seed)).run().write(tmp_path)], Options(jobs=1)
    ).measurements.run
    ledger = make_ledger(run)
    alone = {one.id: one.alone_ms for one in ledger.causes}
    assert len(alone) > 1
    together = alone_of(run, (*alone, "input.nothing"))
    assert together is not None
    low, likely, high = together
    assert 0 <= low <= likely <= high <= ledger.step_ms
    assert likely >= max(ms for _, ms, _ in alone.values())
    assert likely == pytest.approx(ledger.step_ms - ledger.ideal_ms, abs=0.02 * ledger.step_ms)
    assert alone_of(run, ("nothing",)) is None
    assert alone_of(run, (next(iter(alone)),)) == next(iter(alone.values()))


def test_what_remains_of_a_family_does_not_take_its_other_causes_along(tmp_path):
    """Of 40 ms of communication most is a slow link; the rest and a late rank give what each gives."""
    ledger_of(tmp_path, reduced(late_ms=15.0))
    run = tracedoc.measure([tmp_path], Options(jobs=1)).measurements.run
    alone = {one.id: one.alone_ms[1] for one in make_ledger(run).causes}
    assert alone["link.slow"] > 30.0
    pair = alone_of(run, ("link.transfer", "ranks.compute"))
    assert pair is not None
    assert pair[1] == pytest.approx(alone["link.transfer"] + alone["ranks.compute"], abs=0.5)
    all_three = alone_of(run, ("link.transfer", "ranks.compute", "link.slow"))
    assert all_three is not None
    assert all_three[1] == pytest.approx(pair[1] + alone["link.slow"], abs=0.5)


def test_a_rank_without_the_step_counts_as_missing(tmp_path):
    """Rank 1 captured other steps: rank 0 alone shows 40 ms of communication, transfer or waiting."""
    ledger_of(tmp_path, reduced())
    file = tmp_path / "rank-1.json"
    file.write_text(file.read_text().replace("ProfilerStep#", "ProfilerStep#10"))
    ledger = tracedoc.predict([tmp_path], options=Options(jobs=1)).ledger
    assert ledger is not None
    assert_adds_up(ledger)
    assert of(ledger, "link.") == pytest.approx(40.0, abs=1.0)


def test_a_diagnosis_keeps_its_ledger_and_old_ones_load(tmp_path):
    ledger_of(tmp_path, reduced(late_ms=15.0))
    diagnosis = tracedoc.diagnose(tmp_path)
    assert diagnosis.ledger is not None
    text = to_json(diagnosis)
    assert from_json(text).ledger == diagnosis.ledger
    old = text.replace('"schema_version": "2"', '"schema_version": "1"')
    assert from_json(old).schema_version == "1"
    assert tracedoc.diagnose(tmp_path, Options(replay=False)).ledger is None
    assert list(diagnosis.to_frame("ledger")["id"]) == [one.id for one in diagnosis.ledger.causes]


@pytest.mark.parametrize("seed", range(8))
def test_shares_add_up_in_drawn_jobs(tmp_path, seed):
    run = Simulation(draw_job(seed)).run().write(tmp_path)
    first, again = (tracedoc.predict([run], options=Options(jobs=1)).ledger for _ in range(2))
    assert first is not None
    assert first == again
    assert first.step_ms > 0, first.reason
    assert_adds_up(first)


def ms(least):
    return st.floats(least, 1e6, allow_subnormal=False)


@given(ms(0), st.dictionaries(st.text(), st.builds(Weights, ms(-1e6), ms(-1e6)), min_size=1))
def test_parts_add_up_to_the_whole(total, weights):
    parts = split_by_size(total, weights)
    assert sum(parts.values()) == pytest.approx(total, rel=1e-9, abs=1e-9)
    assert all(part >= 0 for part in parts.values())


@pytest.mark.parametrize(
    ("alone", "last", "size"), [(10.0, 20.0, 15.0), (20.0, 10.0, 15.0), (-10.0, 4.0, 0.0), (-2.0, 8.0, 3.0)]
)
def test_the_size_of_a_cause_is_the_middle_of_what_it_gives_alone_and_last(alone, last, size):
    assert Weights(alone, last).size == size


def test_a_total_is_split_by_size_and_equally_where_nothing_has_any():
    assert split_by_size(30.0, {"a": Weights(0.0, 20.0), "b": Weights(20.0, 20.0)}) == {"a": 10.0, "b": 20.0}
    assert split_by_size(30.0, {"a": Weights(0.0, 0.0), "b": Weights(-1.0, 0.0)}) == {"a": 15.0, "b": 15.0}


def test_a_step_in_which_nothing_computes_has_no_ledger(shared_traces):
    """One collective is all that was recorded: what it waits for, or could hide behind, is not there."""
    trace = shared_traces / "format_variants/rank-70.Mar_25_20_48_12.2861.pt.trace.json.gz"
    diagnosis = tracedoc.diagnose([trace], Options(jobs=1))
    assert diagnosis.ledger is not None
    assert (diagnosis.ledger.causes, diagnosis.ledger.reason) == (
        (),
        "the captured step has no work but communication",
    )
    assert [one.code for one in diagnosis.limits if one.code == "internal-error"] == []
