"""What a change makes of a step, on lanes whose answer is worked out by hand."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

import tracedoc
from tracedoc.errors import ChangeError
from tracedoc.play.run_replay import RunReplay, replay_run
from tracedoc.predicted import LARGER_BATCH, NotPredicted, Predicted, WhatIf
from tracedoc.testing import TraceBuilder
from tracedoc.whatif.changes.registry import CHANGES, request
from tracedoc.whatif.predictions import Prediction, predict


def ddp(folder, *, late_ms: float = 0.0, steps: int = 4, op: str = "allreduce"):
    """Two ranks; a step is 60 ms of compute, then 40 ms of a collective, which the next step waits for.

    The host launches all of a step at once, and waits for it at its end. Rank 1 computes ``late_ms`` longer.
    """
    for rank in range(2):
        builder = TraceBuilder(rank, 2)
        for index in range(steps):
            start = (101.0 + late_ms) * index + 1.0
            builder.step(index, start - 0.5, start + 100.4 + late_ms)
            mine = 60.0 + (late_ms if rank == 1 else 0.0)
            builder.kernel("sgemm", start, start + mine, launch_ms=start - 0.01)
            done = start + 100.0 + late_ms
            builder.backward(start + 0.02, start + 0.1)
            builder.collective(op, start + mine, done, nbytes=64 << 20, launch_ms=start + 0.03)
            builder.runtime("cudaDeviceSynchronize", start + 0.2, done + 0.01)
        builder.write(folder / f"rank-{rank}.json")
    return folder


@pytest.mark.parametrize(("op", "step_ms"), [("allreduce", 80.0), ("alltoall", 100.0)])
def test_messages_of_samples_grow_with_the_batch(tmp_path, op, step_ms) -> None:
    """Half of 120 ms of compute and of the message: gradients stay at 40 ms, samples take 80."""
    one = predicted(tracedoc.predict([ddp(tmp_path, op=op)], ["double-batch"]))
    assert one.step_ms[1] == pytest.approx(step_ms, abs=1.0)


def test_short_kernels_of_twice_the_batch_take_less_than_twice_as_long(tmp_path) -> None:
    """Of each 12.5 us 5 are for its start and last wave: 40 kernels take 0.8 ms for 0.5, the update 0.5."""
    builder = TraceBuilder(0, 1)
    for index in range(4):
        start = 1.0 + index
        builder.step(index, start - 0.2, start + 0.78)
        for place in range(40):
            begins = start + 0.0125 * place
            builder.kernel("sgemm", begins, begins + 0.0125, launch_ms=start - 0.15 + 0.003 * place)
        builder.backward(start - 0.02, start - 0.01)
        builder.optimizer(start, start + 0.1)
        builder.kernel("adam", start + 0.5, start + 1.0, launch_ms=start + 0.05)
    builder.write(tmp_path / "rank-0.json")
    one = predicted(tracedoc.predict([tmp_path], ["double-batch"]))
    assert one.step_ms == pytest.approx((0.65, 0.65, 0.75), abs=0.02)


@pytest.mark.parametrize(("mib", "step_ms"), [(64, 100.0), (32, 90.0)])
def test_sums_of_layers_that_ranks_split_grow_with_the_batch_in_both_passes(tmp_path, mib, step_ms) -> None:
    """Compute 30 and 30 ms, 60 for twice the samples; 20 ms of 64 MiB in forward, so also that in backward.

    Of another size it is of gradients: 20 ms for twice the samples.
    """
    for rank in range(2):
        builder = TraceBuilder(rank, 2)
        for index in range(4):
            start = 101.0 * index + 1.0
            builder.step(index, start - 0.5, start + 100.4)
            builder.kernel("sgemm", start, start + 30, launch_ms=start - 0.02)
            builder.collective("allreduce", start + 30, start + 50, nbytes=64 << 20, launch_ms=start - 0.01)
            builder.backward(start + 0.02, start + 0.1)
            builder.kernel("sgemm", start + 50, start + 80, launch_ms=start + 0.03)
            builder.collective("allreduce", start + 80, start + 100, nbytes=mib << 20, launch_ms=start + 0.05)
            builder.runtime("cudaDeviceSynchronize", start + 0.2, start + 100.01)
        builder.write(tmp_path / f"rank-{rank}.json")
    one = predicted(tracedoc.predict([tmp_path], ["double-batch"]))
    assert one.step_ms[1] == pytest.approx(step_ms, abs=1.0)


def test_gathers_for_which_the_host_waits_cannot_run_ahead(sample_traces) -> None:
    """On CPUs FSDP's call of a gather returns when it has ended."""
    (one,) = tracedoc.predict([sample_traces / "cpu_fsdp2"], ["gather-ahead"]).alone
    assert isinstance(one, NotPredicted)
    assert "gathers to move" in one.reason


def predicted(answer: WhatIf) -> Predicted:
    (one,) = answer.alone
    assert isinstance(one, Predicted), one
    return one


def test_half_the_bytes_take_half_of_the_transfer_less_latency(tmp_path):
    one = predicted(tracedoc.predict([ddp(tmp_path)], ["scale-bytes by=0.5"]))
    low, likely, high = one.step_ms
    # 40 ms of transfer, of which at most 4/68 are latency: 20 ms saved, or 18.8.
    assert low == pytest.approx(81.0, abs=0.1)
    assert high == pytest.approx(82.2, abs=0.1)
    assert low <= likely <= high
    assert one.then_limited_by == "compute"


def test_a_late_rank_that_is_like_the_others_saves_its_excess(tmp_path):
    answer = tracedoc.predict([ddp(tmp_path, late_ms=15.0)], ["even-rank rank=1", "even-rank rank=0"])
    late, other = answer.alone
    assert isinstance(late, Predicted)
    assert isinstance(other, Predicted)
    assert late.gain_ms[1] == pytest.approx(15.0, abs=0.1)
    assert other.gain_ms[1] == pytest.approx(0.0, abs=0.1)


@pytest.mark.parametrize("excess_ms", [15.0, 2.0])
def test_a_gain_is_as_wide_as_half_of_the_replays_error(tmp_path, excess_ms):
    """Half of an error of a tenth of 116 ms are 5.8 ms, on both sides; no more than the gain itself."""
    run = tracedoc.measure([ddp(tmp_path, late_ms=excess_ms)]).measurements.run
    replay = replay_run(run)
    assert isinstance(replay, RunReplay)
    exact, wide = (
        predict(
            replace(replay, step_ms=116.0, model_error_frac=error), [[request("even-rank", {"rank": 1.0})]]
        )[0]
        for error in (0.0, 0.1)
    )
    assert isinstance(exact, Prediction)
    assert isinstance(wide, Prediction)
    low, likely, high = exact.gain_ms
    spread = min(5.8, likely)
    assert wide.gain_ms == pytest.approx((low - spread, likely, high + spread))


def waiting_for_batches(folder):
    """A step waits 80 ms for its batch, then computes for 30 ms."""
    builder = TraceBuilder(0, 1)
    for index in range(5):
        start = 110.0 * index + 1
        builder.step(index, start, start + 110).loader(start, start + 80)
        builder.kernel("sgemm", start + 80, start + 109.99, launch_ms=start + 80)
        builder.runtime("cudaDeviceSynchronize", start + 80.01, start + 109.99)
    builder.write(folder / "rank-0.json")
    return folder


@pytest.mark.parametrize(("share", "step_ms"), [(1.0, 80.0), (0.5, 40.0), (0.125, 30.0), (0.0, 30.0)])
def test_workers_make_batches_while_the_step_before_computes(tmp_path, share, step_ms):
    """With workers the slower of both counts."""
    one = predicted(tracedoc.predict([waiting_for_batches(tmp_path)], [f"feed-input by={share}"]))
    assert one.step_ms[0] == pytest.approx(step_ms, abs=0.3)


def test_a_part_of_the_wait_for_a_batch_stays(tmp_path):
    """Kernels twice as fast save 15 ms, batches that are ready 80, of which a quarter may stay elsewhere."""
    changes = ["faster-kernels of=all by=2", "feed-input by=0"]
    _, both = tracedoc.predict([waiting_for_batches(tmp_path)], changes).together
    assert both.gain_ms[2] == pytest.approx(15 + 80, abs=0.3)
    assert 15 + 0.75 * 80 - 0.3 < both.gain_ms[1] < 15 + 80 - 1


@pytest.mark.parametrize(("by", "step_ms"), [(3, (85.0, 90.0, 100.0)), (10, (81.5, 83.0, 86.0))])
def test_products_in_fewer_bits_may_be_twice_as_fast_as_likely_or_half(tmp_path, by, step_ms):
    """After 80 ms of waiting 30 ms of products: three times as fast they take 10 ms, six times 5."""
    one = predicted(tracedoc.predict([waiting_for_batches(tmp_path)], [f"fewer-bits by={by}"]))
    assert one.step_ms == pytest.approx(step_ms, abs=0.3)
    assert one.assumptions == (f"products in fp32 run {by} times as fast, from half of that to twice",)


def reduced(folder, sizes_mib, *, gap_ms: float = 0.0, latency_ms: float = 0.0):
    """Two ranks; 20 ms of forward, four times 10 ms of backward, then all-reduces at 1.6 MiB a ms.

    Each all-reduce begins ``gap_ms`` after the one before it has ended, and takes ``latency_ms`` more than
    its bytes. The host launches all of a step at once, and waits for it at its end.
    """
    length = 60.0 + sum(size / 1.6 + gap_ms + latency_ms for size in sizes_mib)
    for rank in range(2):
        builder = TraceBuilder(rank, 2)
        for index in range(4):
            start = (length + 1) * index + 1.0
            builder.step(index, start - 0.5, start + length + 0.4)
            builder.backward(start + 0.02, start + 0.2)
            builder.kernel("sgemm", start, start + 20, launch_ms=start - 0.01)
            for one in range(4):
                begin = start + 20 + 10 * one
                builder.kernel("sgemm", begin, begin + 10, launch_ms=start + 0.03 + 0.01 * one)
            at = start + 60.0
            for number, size in enumerate(sizes_mib):
                at, end = at + gap_ms, at + gap_ms + size / 1.6 + latency_ms
                launch_ms = start + 0.1 + 0.01 * number
                builder.collective("allreduce", at, end, nbytes=int(size * 2**20), launch_ms=launch_ms)
                at = end
            builder.runtime("cudaDeviceSynchronize", start + 0.3, start + length + 0.01)
        builder.write(folder / f"rank-{rank}.json")
    return folder


def test_a_large_bucket_is_cut_and_travels_beside_the_backward_pass(tmp_path):
    """64 MiB in 40 ms become four pieces, which are ready at 30, 40, 50 and 60 ms.

    Without latency each takes 10 ms, and the last one ends at 70. In the slow scenario 4/68 of the 40 ms are
    latency, so that a piece takes 11.8 ms; they are ready at 40, 50, 60 and 60 ms. Three pieces make 35.3 of
    40 ms of compute 15 % slower: the first one is ready at 42.6 ms, and the last one ends 47 ms later.
    """
    low, likely, high = predicted(tracedoc.predict([reduced(tmp_path, [64])], ["cap-buckets mib=16"])).step_ms
    assert low == pytest.approx(71.0, abs=0.1)
    assert high == pytest.approx(1 + 42.65 + 4 * 11.76, abs=0.2)
    assert low <= likely <= high


def test_small_buckets_are_filled_in_their_order(tmp_path):
    """Of 4, 4, 12 and 4 MiB up to 16 fit: 4 + 4, 12 + 4. All of them end together; only latency is saved.

    That is 1 ms for each message less, by the line through both sizes, and between half and 1.5 of it.
    """
    run = reduced(tmp_path, [4, 4, 12, 4], latency_ms=1.0)
    (by_size,) = tracedoc.predict([run], ["cap-buckets mib=16"]).alone
    assert isinstance(by_size, Predicted)
    (same,) = tracedoc.predict([run], ["cap-buckets mib=12"]).alone
    assert isinstance(same, Predicted)  # 4 + 4, 12, 4
    assert by_size.gain_ms == pytest.approx((1.0, 2.0, 3.0), abs=0.02)
    assert same.gain_ms == pytest.approx((0.5, 1.0, 1.5), abs=0.02)


def test_buckets_of_the_size_that_is_asked_for_stay(tmp_path):
    (one,) = tracedoc.predict([reduced(tmp_path, [12, 12])], ["cap-buckets mib=16"]).alone
    assert isinstance(one, NotPredicted)
    assert "about that large" in one.reason


def test_changes_are_made_one_on_top_of_the_other(tmp_path):
    answer = tracedoc.predict(
        [ddp(tmp_path, late_ms=15.0)], ["even-rank rank=1", "faster-kernels by=2", "faster-link by=100"]
    )
    steps = [one.step_ms[1] for one in answer.together]
    assert steps[0] == pytest.approx(101.0, abs=0.2)
    assert steps[1] == pytest.approx(71.0, abs=0.2)
    assert steps[2] < 35.0


def test_without_a_change_the_path_and_the_ledger_are_reported(tmp_path):
    answer = tracedoc.predict([ddp(tmp_path)])
    assert answer.replay.path["compute"] == pytest.approx(0.594, abs=0.01)
    assert answer.replay.path["communication"] == pytest.approx(0.396, abs=0.01)
    assert answer.ledger is not None
    assert sum(one.share_ms for one in answer.ledger.causes if one.id.startswith("link.")) > 37.0


def test_a_change_that_does_not_fit_says_why(tmp_path):
    (one,) = tracedoc.predict([ddp(tmp_path)], ["feed-input"]).alone
    assert isinstance(one, NotPredicted)
    assert "no data loader" in one.reason


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("scale-byte", "did you mean 'scale-bytes'"),
        ("scale-bytes by", "is no parameter"),
        ("scale-bytes by=x", "cannot be 'x'"),
        ("scale-bytes by=nan", "cannot be nan"),
        ("scale-bytes to=2", "has no parameter 'to'"),
        ("scale-bytes of=weights", "cannot be 'weights'"),
        ("even-rank", "needs rank"),
        ("", "has a name"),
    ],
)
def test_a_wrong_change_is_told_with_the_way_out(change, words):
    with pytest.raises(ChangeError) as caught:
        tracedoc.predict(["nowhere"], [change])
    assert words in caught.value.message
    assert caught.value.hint


def test_more_ranks_send_more_and_keep_latency_between_a_tree_and_a_ring(tmp_path):
    """An all-reduce of 4 ranks crosses each link 1.5 times instead of once: 40 -> 60 ms.

    At most 4/68 of the 40 ms are latency, which a ring of 4 has three times: 7.06 + 1.5 * 37.65 ms.
    """
    low, likely, high = predicted(tracedoc.predict([ddp(tmp_path)], ["more-ranks by=2"])).step_ms
    assert low == pytest.approx(121.0, abs=0.1)
    assert high == pytest.approx(101.0 - 40.0 + 7.06 + 56.47, abs=0.1)
    assert low <= likely <= high


def test_the_last_of_more_ranks_may_come_later(tmp_path):
    """A rank that is 15 ms late of two: the expected largest of 4 deviates is 1.78 times that of 2."""
    run = ddp(tmp_path, late_ms=15.0)
    low, likely, high = predicted(tracedoc.predict([run], ["more-ranks by=2"])).step_ms
    assert low == pytest.approx(136.0, abs=0.1)
    assert high == pytest.approx(116.0 - 40.0 + 7.06 + 56.47 + 0.78 * 15.0, abs=0.2)
    assert low < likely < high


def test_one_rank_has_no_link_to_go_on_with(tmp_path):
    builder = TraceBuilder(0, 1)
    for index in range(3):
        start = 100.0 * index + 1.0
        builder.step(index, start - 0.5, start + 99.0)
        builder.kernel("sgemm", start, start + 90.0, launch_ms=start - 0.01)
        builder.runtime("cudaDeviceSynchronize", start + 0.2, start + 98.0)
    builder.write(tmp_path / "rank-0.json")
    (answer,) = tracedoc.predict([tmp_path], ["more-ranks"]).alone
    assert isinstance(answer, NotPredicted)
    assert "no collective of several ranks" in answer.reason


def test_a_diagnosis_keeps_the_step_on_more_ranks(tmp_path):
    diagnosis = tracedoc.diagnose(ddp(tmp_path))
    assert diagnosis.replay is not None
    twice, four_times = diagnosis.replay.more_ranks
    assert isinstance(twice, Predicted)
    assert isinstance(four_times, Predicted)
    assert twice.step_ms[1] < four_times.step_ms[1]


def test_compiling_shortens_launches_and_no_long_gap(tmp_path):
    """Of a step of 36 ms the host launches nothing for 15.5, more than 20 launch intervals, which stay.

    The other 20.5 ms take 20, 40 or 80 % of their time then, or as CUDA graphs 3, 6 or 20 %.
    """
    builder = TraceBuilder(0, 1)
    for index in range(5):
        start = 36.0 * index + 1.0
        builder.step(index, start, start + 36.0)
        builder.backward(start + 0.1, start + 35.0)
        for one in range(40):
            at = start + 0.2 + 0.5 * one + (15.0 if one >= 20 else 0.0)
            builder.kernel("sgemm", at + 0.01, at + 0.03, launch_ms=at)
        builder.runtime("cudaDeviceSynchronize", start + 34.9, start + 35.0)
    builder.write(tmp_path / "rank-0.json")
    answer = tracedoc.predict([tmp_path], ["compile-model", "capture-graph"])
    for one, shares in zip(answer.alone, ((0.2, 0.4, 0.8), (0.03, 0.06, 0.2)), strict=True):
        assert isinstance(one, Predicted)
        assert one.gain_ms[::-1] == pytest.approx([(1 - share) * 20.5 for share in shares], abs=0.1)


def test_changes_that_do_more_work_a_step_are_those_that_enlarge_the_batch():
    assert {name for name, change in CHANGES.items() if change.units > 1} == {*LARGER_BATCH}
