"""Every bound on a gain by hand: what limits it, and what it says where something was not measured."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tracedoc.diagnosis import Gain
from tracedoc.facts.catalog import CATALOG, NEEDS, Measurement
from tracedoc.facts.measure_run import Availability, Measurements
from tracedoc.judge.load import load_rules
from tracedoc.judge.rule import AtMost
from tracedoc.ranks.run_view import build_run_view
from tracedoc.values import Unknown
from tracedoc.whatif.bounds import at_most
from tracedoc.whatif.gains import GAINS

AT_MOST = {rule.id: rule.gain for rule in load_rules() if isinstance(rule.gain, AtMost)}
NOT_SEEN = Unknown("not captured")
Facts = Mapping[str, float | Unknown]

# A step of 100 ms whose host works for 30: whatever else is fixed, 70 ms can be gained at most. Of 60 ms of
# compute, 10 run beside communication (of its 30 ms, 20 are exposed): 50 ms are free to hide something.
STEP: Facts = {
    "step_ms": 100.0,
    "host_floor_ms": 30.0,
    "compute_ms": 60.0,
    "comm_ms": 30.0,
    "exposed_comm_ms": 20.0,
    "non_compute_ms": 40.0,
}


def gain(name: str, facts: Facts, *, is_cpu: bool = False, absent: str = "") -> Gain | Unknown:
    """Return what the estimator ``name``, or the rule of that name, says of these facts, and of no others."""
    table = {fact: Measurement(CATALOG[fact], value) for fact, value in facts.items()}
    available = {need: Availability("by_nature" if need == absent else "present") for need in NEEDS}
    measurements = Measurements(table, available, "high", is_cpu, (0,), (1, 2, 3), build_run_view((), None))
    if name in GAINS:
        return GAINS[name](measurements, None)
    bound = AT_MOST[name]
    return at_most(measurements, None, CATALOG[bound.fact], bound.assuming, host_stays=bound.within_host_work)


BOUNDED = [
    # What is saved, as far as the host's own work lets it.
    ("small-collectives", {"latency_bound_exposed_ms": 20.0}, 20.0),
    ("small-collectives", {"latency_bound_exposed_ms": 80.0}, 70.0),
    ("idle-tensor-cores", {"tensor_core_saving_ms": 50.0}, 50.0),
    ("idle-tensor-cores", {"tensor_core_saving_ms": 80.0}, 70.0),
    ("small-gradient-buckets", {"bucket_saving_ms": 12.0}, 12.0),
    ("small-gradient-buckets", {"bucket_saving_ms": -3.0}, 0.0),
    ("reduction-every-micro-batch", {"repeated_reduction_ms": 90.0}, 70.0),
    ("gather-ahead", {"hideable_gather_stall_ms": 14.0}, 14.0),
    ("gather-ahead", {"hideable_gather_stall_ms": 75.0}, 70.0),
    ("gather-backward-ahead", {"hideable_backward_stall_ms": 17.0}, 17.0),
    # Rules whose bound is the time of one fact, within the host's own work or not.
    ("fp32-gradient-reduction", {"fp32_reduction_saving_ms": 80.0}, 70.0),
    ("extra-barriers", {"extra_collectives_ms": 80.0}, 80.0),
    ("non-gradient-communication", {"beside_gradients_ms": 80.0}, 80.0),
    ("buffer-broadcast", {"buffer_broadcast_ms": 80.0}, 70.0),
    ("unused-parameter-search", {"unused_search_ms": 80.0}, 80.0),
    ("exposed-parameter-gather", {"optimizer_gather_ms": 80.0}, 70.0),
    ("collective-outlier", {"outlier_transfers_ms": 80.0}, 80.0),
    ("slow-link", {"slow_group_ms": 80.0}, 80.0),
    ("all-to-all-imbalance", {"all_to_all_imbalance_ms": 80.0}, 70.0),
    ("gloo-on-gpu", {"gloo_stall_ms": 80.0}, 80.0),
    ("needless-regather", {"regather_exposed_ms": 80.0}, 70.0),
    ("needless-sharding", {"sharded_exposed_ms": 80.0}, 70.0),
    ("needless-recompute", {"recompute_ms": 80.0}, 70.0),
    ("recompilation", {"recompile_ms": 80.0}, 80.0),
    ("unfused-attention", {"unfused_attention_ms": 80.0}, 70.0),
    ("overlap-contention", {"contention_ms": 80.0}, 70.0),
    ("communication-on-compute-stream", {"compute_stream_transfer_ms": 80.0}, 70.0),
    ("cross-node-sharding", {"gather_bandwidth_stall_ms": 80.0}, 80.0),
    ("gather-behind-reduce", {"gather_behind_reduce_ms": 80.0}, 80.0),
    ("reduce-scatter-buffer-stall", {"reduce_buffer_stall_ms": 80.0}, 80.0),
    ("tiny-parameter-gathers", {"tiny_gather_cost_ms": 80.0}, 80.0),
    ("cross-node-tensor-parallel", {"layer_exchange_ms": 80.0}, 70.0),
    # 60 ms do not hide behind 50 of compute, but fewer bytes, or fewer ranks, send less of them.
    ("exposed-all-to-all", {"all_to_all_exposed_ms": 60.0}, 60.0),
    ("exposed-all-to-all", {"all_to_all_exposed_ms": 80.0}, 70.0),
    ("exposed-tensor-parallel", {"layer_exchange_ms": 60.0}, 60.0),
    ("exposed-tensor-parallel", {"layer_exchange_ms": 80.0}, 70.0),
    ("pipeline-p2p-exposed", {"p2p_exposed_ms": 60.0}, 60.0),
    ("pipeline-p2p-exposed", {"p2p_exposed_ms": 80.0}, 70.0),
    # Only compute with no communication beside it can hide more.
    ("hide-exposed-communication", {"exposed_comm_excluding_wait_ms": 20.0}, 20.0),
    ("hide-exposed-communication", {"exposed_comm_excluding_wait_ms": 60.0}, 50.0),
    ("hide-exposed-communication", {"exposed_comm_excluding_wait_ms": 60.0, "host_floor_ms": 55.0}, 45.0),
    ("split-units", {"sharded_exposed_ms": 20.0}, 20.0),
    # 15 ms of compute have nothing beside them, and of 40 ms 20 at most travel beside the other 20.
    ("split-units", {"sharded_exposed_ms": 40.0, "compute_ms": 25.0}, 35.0),
    ("reduce-in-backward", {"late_reduction_ms": 30.0, "backward_compute_ms": 25.0}, 25.0),
    ("reduce-in-backward", {"late_reduction_ms": 20.0, "backward_compute_ms": 25.0}, 20.0),
    ("reduce-in-backward", {"late_reduction_ms": 30.0, "backward_compute_ms": NOT_SEEN}, 30.0),
    # 60 ms at three quarters of the rate take 45 at the full one; what hides today may go on hiding.
    ("full-link-rate", {"exposed_transfer_ms": 40.0, "comm_ms": 60.0, "link_efficiency_frac": 0.75}, 15.0),
    ("full-link-rate", {"exposed_transfer_ms": 10.0, "comm_ms": 60.0, "link_efficiency_frac": 0.75}, 10.0),
    ("full-link-rate", {"exposed_transfer_ms": 40.0, "link_efficiency_frac": 1.2}, 0.0),
    ("tail-all-reduce", {"splittable_reduction_ms": 12.0}, 12.0),
    ("exposed-copies", {"exposed_copy_ms": 80.0}, 70.0),
    # 9 units for 3 blocks: two thirds of the 12 ms of hooks go, so the host leaves 70 + 8.
    (
        "merge-units",
        {
            "fine_wrapping_cost_ms": 90.0,
            "fsdp_units": 9.0,
            "fsdp_blocks": 3.0,
            "sharding_hook_host_ms": 12.0,
        },
        78.0,
    ),
    (
        "merge-units",
        {
            "fine_wrapping_cost_ms": 90.0,
            "fsdp_units": 3.0,
            "fsdp_blocks": 9.0,
            "sharding_hook_host_ms": 12.0,
        },
        70.0,
    ),
    ("merge-units", {"fine_wrapping_cost_ms": 90.0, "sharding_hook_host_ms": NOT_SEEN}, 70.0),
    # The host was blocked for 25 ms; idle after waits and behind late launches: 10 and 8.
    (
        "avoid-syncs",
        {"sync_idle_ms": 10.0, "sync_blocked_ms": 25.0, "late_launch_idle_ms": 8.0},
        18.0,
    ),
    (
        "avoid-syncs",
        {"sync_idle_ms": 10.0, "sync_blocked_ms": 13.0, "late_launch_idle_ms": 8.0},
        13.0,
    ),
    # A host that is ahead also loads the next batch while the GPU works.
    (
        "avoid-syncs",
        {"sync_idle_ms": 10.0, "sync_blocked_ms": 25.0, "late_launch_idle_ms": 8.0, "input_idle_ms": 5.0},
        23.0,
    ),
    ("avoid-syncs", {"sync_idle_ms": 10.0, "sync_blocked_ms": 4.0, "late_launch_idle_ms": 8.0}, 10.0),
    ("avoid-syncs", {"sync_idle_ms": 10.0, "sync_blocked_ms": NOT_SEEN, "late_launch_idle_ms": 8.0}, 10.0),
    ("avoid-syncs", {"sync_idle_ms": 10.0, "sync_blocked_ms": 25.0, "late_launch_idle_ms": NOT_SEEN}, 10.0),
    # Half of the 40 ms without compute.
    ("fill-the-step", {}, 20.0),
    # Idle time that the host's pace or waits explain is not bounded by the host's work: that is what changes.
    ("host-bound-launches", {"launch_pace_idle_ms": 80.0}, 80.0),
    ("host-away", {"host_away_idle_ms": 40.0}, 40.0),
    ("unfused-optimizer", {"optimizer_idle_ms": 3.0}, 3.0),
    ("tiny-kernels", {"short_kernel_idle_ms": 3.0}, 3.0),
    ("input-stall", {"input_idle_ms": 38.0}, 38.0),
    ("allocator-churn", {"allocator_idle_ms": 12.0}, 12.0),
    ("pageable-copies", {"pageable_stall_ms": 10.0}, 10.0),
    ("stop-collections", {"gc_cost_ms": 12.0}, 12.0),
    ("stop-collections", {"gc_cost_ms": 12.0, "logged_step_ms": 80.0}, 12.0),
    # They fill most of each logged step, so they are among the 40 ms without compute of the captured one.
    ("stop-collections", {"gc_cost_ms": 160.0, "logged_step_ms": 200.0}, 40.0),
    ("step-outliers", {"slow_steps_cost_ms": -2.0}, 0.0),
    ("cpu-offload-transfer", {"offload_stall_ms": 70.0}, 70.0),
    ("rotating-straggler", {"straggler_any_cost_ms": 25.0}, 25.0),
    ("alternating-straggler", {"straggler_turn_ms": 25.0}, 25.0),
    ("uneven-work", {"uneven_work_ms": 26.0}, 26.0),
    ("script-code", {"script_code_ms": 35.0}, 35.0),
    ("pipeline-bubble", {"pipeline_bubble_excess_ms": 40.0}, 40.0),
]


@pytest.mark.parametrize(("name", "facts", "high"), BOUNDED)
def test_a_fix_gives_at_most(name: str, facts: Facts, high: float) -> None:
    found = gain(name, {**STEP, **facts})
    assert isinstance(found, Gain)
    assert (found.low_ms, found.high_ms) == (0.0, pytest.approx(high))
    assert (found.basis, len(found.assumptions)) == ("ceiling", 2 if name == "fill-the-step" else 1)


@pytest.mark.parametrize(
    ("least", "bounds"),
    [(10.0, (10.0, 30.0)), (45.0, (30.0, 30.0)), (NOT_SEEN, (0.0, 30.0))],
)
def test_what_every_rank_waits_is_surely_gained(least: float | Unknown, bounds: tuple[float, float]) -> None:
    found = gain("remove-straggler-wait", {**STEP, "straggler_cost_ms": 30.0, "straggler_least_ms": least})
    assert isinstance(found, Gain)
    assert (found.low_ms, found.high_ms) == bounds


@pytest.mark.parametrize(
    ("is_cpu", "recurring", "bounds"),
    [
        (True, 20.0, (10.0, 20.0)),
        (True, 5.0, (5.0, 5.0)),
        (True, 50.0, (10.0, 30.0)),
        (True, NOT_SEEN, (10.0, 30.0)),
        (False, 20.0, (10.0, 30.0)),
    ],
)
def test_on_a_shared_processor_only_what_recurs_is_gained(
    is_cpu: bool, recurring: float | Unknown, bounds: tuple[float, float]
) -> None:
    facts = {"straggler_cost_ms": 30.0, "straggler_least_ms": 10.0, "straggler_recurring_ms": recurring}
    found = gain("remove-straggler-wait", {**STEP, **facts}, is_cpu=is_cpu)
    assert isinstance(found, Gain)
    assert (found.low_ms, found.high_ms) == bounds
    recurs = is_cpu and recurring in (20.0, 5.0)
    assert ("in most steps" in found.assumptions[0]) == recurs


@pytest.mark.parametrize(("is_cpu", "least"), [(True, 6.0), (False, 10.0)])
def test_what_a_late_rank_waits_for_a_core_is_not_sure(is_cpu: bool, least: float) -> None:
    facts: Facts = {"straggler_cost_ms": 30.0, "straggler_least_ms": 10.0, "core_wait_ms": 4.0}
    found = gain("remove-straggler-wait", {**STEP, **facts}, is_cpu=is_cpu)
    assert isinstance(found, Gain)
    assert (found.low_ms, found.high_ms) == (least, 30.0)


MAIN = {name: next(iter(facts)) for name, facts, _ in BOUNDED if facts and name != "fill-the-step"}
MAIN |= dict.fromkeys(("remove-straggler-wait", "not-wait-for-rank"), "straggler_cost_ms")
MAIN["balance-stages"] = "stage_imbalance_ms"


def test_equal_stages_give_what_the_replay_says_within_its_margin() -> None:
    found = gain("balance-stages", {**STEP, "stage_imbalance_ms": 20.0})
    assert isinstance(found, Gain)
    assert (found.low_ms, found.high_ms, found.basis) == (pytest.approx(17), pytest.approx(23), "replay")


def test_the_bound_of_every_rule_is_held_here() -> None:
    assert AT_MOST.keys() <= {name for name, _, _ in BOUNDED}


@pytest.mark.parametrize("name", [*GAINS, *AT_MOST])
def test_what_was_not_measured_promises_nothing(name: str) -> None:
    if name != "fill-the-step":
        found = gain(name, {**STEP, MAIN[name]: NOT_SEEN})
        assert found == NOT_SEEN
    assert isinstance(gain(name, {}), Unknown)


@pytest.mark.parametrize("missing", ["compute_ms", "comm_ms", "exposed_comm_ms"])
@pytest.mark.parametrize(
    ("name", "saved"),
    [("hide-exposed-communication", "exposed_comm_excluding_wait_ms"), ("split-units", "sharded_exposed_ms")],
)
def test_without_the_budget_nobody_knows_what_can_hide(name: str, saved: str, missing: str) -> None:
    found = gain(name, {**STEP, saved: 20.0, missing: NOT_SEEN})
    assert found == Unknown("the budget of the step is not known")


def test_without_the_budget_nobody_knows_what_a_larger_batch_gives() -> None:
    assert gain("fill-the-step", {**STEP, "non_compute_ms": NOT_SEEN}) == Unknown(
        "the budget of the step is not known"
    )


@pytest.mark.parametrize("missing", ["step_ms", "host_floor_ms"])
def test_an_unknown_host_is_an_assumption(missing: str) -> None:
    found = gain("idle-tensor-cores", {**STEP, "tensor_core_saving_ms": 80.0, missing: NOT_SEEN})
    assert isinstance(found, Gain)
    assert found.high_ms == 80.0
    assert "the host's own work is not known" in found.assumptions[1]


def test_the_host_s_work_is_the_compute_of_a_cpu_job() -> None:
    found = gain("hide-exposed-communication", {**STEP, "exposed_comm_excluding_wait_ms": 60.0}, is_cpu=True)
    assert isinstance(found, Gain)
    assert (found.high_ms, len(found.assumptions)) == (50.0, 1)


def test_one_rank_cannot_tell_a_stall_from_waiting() -> None:
    facts = {**STEP, "hideable_gather_stall_ms": 14.0}
    one, several = gain("gather-ahead", facts, absent="multi_rank"), gain("gather-ahead", facts)
    assert isinstance(one, Gain)
    assert isinstance(several, Gain)
    assert one.high_ms == several.high_ms == 14.0
    assert set(one.assumptions) - set(several.assumptions) == {
        "none of it is waiting for peers, which one rank alone cannot show"
    }
