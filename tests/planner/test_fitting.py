"""Hold what a rule may promise a run that is known: whether a change fits on its GPUs."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tracedoc.errors import InputError
from tracedoc.planner.fitting import ADVICE, KnownRun, what_fits

GB = 1e9
RUN = KnownRun(10**9, gpus=4, memory_bytes=40 * GB, peak_bytes=10 * GB, strategy="full-shard")


def test_a_run_that_need_not_be_sharded() -> None:
    """1e9 parameters on 4: 4 GB of shards become 16 GB and 2 GB of copies."""
    found = what_fits(RUN, "do-not-shard")
    assert found.fits
    assert found.added_bytes == pytest.approx(14 * GB)
    assert found.needed_bytes == pytest.approx(24 * GB)
    # Of the 14 GB that are added 8 % more may come, 1.12 GB.
    assert what_fits(replace(RUN, memory_bytes=25.0 * GB), "do-not-shard").fits is False
    assert what_fits(replace(RUN, memory_bytes=25.2 * GB), "do-not-shard").fits is True


def test_gathered_parameters_take_two_bytes_each_until_backward() -> None:
    assert what_fits(RUN, "do-not-reshard").added_bytes == pytest.approx(2 * GB)
    hybrid = replace(RUN, strategy="hsdp", gpus=8, nodes=2)
    assert what_fits(hybrid, "do-not-reshard").added_bytes == pytest.approx(2 * GB)


def test_twice_the_micro_batch_takes_twice_what_it_brings() -> None:
    """6 GB beside the 4 GB of shards, or what was measured."""
    assert what_fits(RUN, "larger-micro-batch").needed_bytes == pytest.approx(16 * GB)
    measured = replace(RUN, activation_bytes=3 * GB)
    assert what_fits(measured, "larger-micro-batch").needed_bytes == pytest.approx(13 * GB)
    assert what_fits(replace(RUN, memory_bytes=15 * GB), "larger-micro-batch").fits is False


def test_without_checkpointing_all_blocks_keep_what_one_does() -> None:
    run = replace(RUN, checkpointing=True, sequence=2048, micro_batch=1)
    one = what_fits(run, "no-checkpointing").added_bytes
    four = what_fits(replace(run, micro_batch=4), "no-checkpointing").added_bytes
    assert one is not None
    assert 1 * GB < one < 6 * GB
    assert four == pytest.approx(4 * one)


def test_an_optimizer_that_comes_back_takes_its_states() -> None:
    """ZeRO-2 keeps 2 GB of weights; 14 of 16 bytes a parameter are on the host, a quarter of them each."""
    run = replace(RUN, strategy="zero-2", offload="optimizer")
    assert what_fits(run, "optimizer-on-gpu").added_bytes == pytest.approx(14 / 4 * GB)


def test_frozen_parameters_have_no_states() -> None:
    """LoRA of 1e7 on 1e9: 0.99 GB x 2 bytes of frozen weights, and 1 % of the states."""
    run = replace(RUN, trained_parameters=10**7)
    added = what_fits(run, "do-not-shard").added_bytes
    frozen = 0.99 * 2 * GB * (1 - 1 / 4)
    assert added == pytest.approx(frozen + 0.01 * 14 * GB)


@pytest.mark.parametrize(
    ("changes", "change", "reason"),
    [
        ({"memory_bytes": None}, "do-not-shard", "the memory of the GPU"),
        ({"peak_bytes": None}, "do-not-shard", "the peak of the run"),
        ({"parameters": None}, "do-not-shard", "the parameters"),
        ({"strategy": ""}, "larger-micro-batch", "the strategy"),
        ({"optimizer": "lion"}, "do-not-shard", "the optimizer"),
        ({"strategy": "ddp"}, "do-not-shard", "nothing is sharded"),
        ({"strategy": "zero-2"}, "do-not-reshard", "not gathered twice"),
        ({}, "no-checkpointing", "not checkpointed"),
        ({"checkpointing": True}, "no-checkpointing", "tokens of a micro-batch"),
        ({}, "optimizer-on-gpu", "nothing is offloaded"),
    ],
)
def test_what_is_not_known_is_not_promised(changes: dict[str, object], change: str, reason: str) -> None:
    found = what_fits(replace(RUN, **changes), change)
    assert found.fits is None
    assert reason in found.reason


def test_names_that_are_not_known_are_answered() -> None:
    assert all(what_fits(RUN, name) for name in ADVICE)
    with pytest.raises(InputError, match="no change"):
        what_fits(RUN, "shard-more")
    with pytest.raises(InputError, match="no strategy"):
        what_fits(replace(RUN, strategy="full"), "do-not-shard")
