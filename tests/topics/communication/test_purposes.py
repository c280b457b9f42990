"""What collectives are for, on steps whose numbers can be worked out by hand."""

from pathlib import Path

import pytest

import tracedoc
from tracedoc.testing import parse_lanes
from tracedoc.values import Unknown, Value


def facts(tmp_path: Path, lanes: str, *, cpu: bool = False) -> dict[str, Value]:
    """Return the facts of two ranks that run these lanes, as those of the rank that stands for the run."""
    device = None if cpu else "NVIDIA H100 80GB HBM3"
    paths = [
        builder.write(tmp_path / f"rank-{number}.json")
        for number, builder in enumerate(parse_lanes(lanes, ranks=2, device=device))
    ]
    found = tracedoc.measure(paths).measurements.facts
    return {name: fact.value for name, fact in found.items()}


def test_metrics_behind_the_optimizer_are_extra_and_norms_before_it_are_not(tmp_path: Path) -> None:
    found = facts(
        tmp_path,
        """
        backward   30-70
        compute    0-70
        allreduce  70-74  8B  dtype=Float
        optimizer  74-90
        allreduce  91-94  8B  dtype=Float
        allgather  94-96  4KiB  dtype=Byte
        compute    96-100
        """,
    )
    assert found["extra_collectives_per_step"] == 2
    assert found["extra_collectives"] == "1 all-reduce, 1 all-gather"
    assert found["extra_collectives_ms"] == 5.0


def test_a_barrier_of_nccl_is_no_all_reduce(tmp_path: Path) -> None:
    found = facts(
        tmp_path,
        """
        backward   30-70
        compute    0-70
        barrier    70-75
        optimizer  75-100
        """,
    )
    assert found["extra_collectives"] == "1 barrier"
    assert found["extra_collectives_ms"] == 5.0
    assert found["gradient_buckets"] is not None


def test_a_barrier_of_gloo_counts_too(tmp_path: Path) -> None:
    found = facts(
        tmp_path,
        """
        compute    0-70
        barrier    70-75
        optimizer  75-100
        """,
        cpu=True,
    )
    assert found["extra_collectives"] == "1 barrier"


def test_parameters_handed_out_count_as_long_as_their_shortest_part(tmp_path: Path) -> None:
    found = facts(
        tmp_path,
        """
        backward   30-70
        compute    0-70
        optimizer  70-80
        broadcast  80-100  64MiB  dtype=Float
        rank 1:
          optimizer  70-96
          broadcast  96-100  64MiB  dtype=Float
        """,
    )
    assert found["optimizer_gather_bytes"] == 64 << 20
    assert found["optimizer_gather_ms"] == 4.0


def test_sums_of_layers_are_told_from_gradients_by_their_group(tmp_path: Path) -> None:
    found = facts(
        tmp_path,
        """
        backward   50-90
        compute    0-10  14-60  64-100
        allreduce  10-14  1MiB  60-64  1MiB
        """,
    )
    assert found["layer_exchanges_per_step"] == 2
    assert found["layer_exchange_bytes"] == 2 << 20
    assert found["layer_exchange_ms"] == 8.0


@pytest.mark.parametrize(("at", "exchanges"), [("20-21", 0), ("4-5", 2)])
def test_what_is_sent_before_the_first_layer_is_none_of_it(tmp_path: Path, at: str, exchanges: int) -> None:
    found = facts(
        tmp_path,
        f"""
        host       {at}    name=aten::linear
        backward   50-90
        compute    0-10  14-60  64-100
        allreduce  10-14  1MiB  60-64  1MiB
        """,
    )
    assert found.get("layer_exchanges_per_step", 0) == exchanges


def test_half_of_what_goes_by_bytes_is_saved_of_fp32_gradients(tmp_path: Path) -> None:
    found = facts(
        tmp_path,
        """
        backward   40-80
        compute    0-80
        allreduce  60-100  1GiB  dtype=Float
        optimizer  100-110
        """,
    )
    # 20 ms are exposed. Two H100 reach half of NVLink's rate at 9.6 MiB: 99 % goes by bytes.
    assert found["gradient_transfer_ms"] == 40.0
    assert found["fp32_gradients_frac"] == 1.0
    saving = found["fp32_reduction_saving_ms"]
    assert isinstance(saving, float)
    assert 9.85 < saving < 10.0
    assert found["trains_in_16_bit"] is True


@pytest.mark.parametrize(
    ("wrapper", "buckets", "extra"), [("DistributedDataParallel.forward", 1, 2), ("forward", 1, 0)]
)
def test_what_ddp_does_not_send_is_no_gradient_where_sizes_are_not_recorded(
    tmp_path: Path, wrapper: str, buckets: int, extra: int
) -> None:
    """A bucket in the backward pass, and two messages behind the optimizer: too late for gradients."""
    lanes = f"""
        host       0-30  name={wrapper}
        compute    0-60
        backward   30-70
        allreduce  60-70
        optimizer  70-80
        allreduce  82-90  92-100
        """
    paths = []
    for number, builder in enumerate(parse_lanes(lanes, ranks=2, device=None)):
        paths.append(builder.write(tmp_path / f"rank-{number}.json"))
        paths[-1].write_text(paths[-1].read_text().replace('"Input Dims"', '"Dims"'))
    found = tracedoc.measure(paths).measurements.facts
    assert found["gradient_bytes"].value == Unknown("not every reduction carries its size")
    assert found["gradient_buckets"].value == buckets
    assert found["extra_collectives_per_step"].value == extra


@pytest.mark.parametrize(("operator", "norms"), [("aten::linalg_vector_norm", 1), ("aten::mean", 0)])
def test_what_is_reduced_before_the_update_is_a_norm_where_one_is_computed_for_it(
    tmp_path: Path, operator: str, norms: int
) -> None:
    """Ten numbers behind the backward pass, of which the first is behind that operator."""
    found = facts(
        tmp_path,
        f"""
        backward   30-60
        compute    0-60
        host       60-61  name={operator}
        allreduce  62-82  4B x10 2ms  dtype=Float
        optimizer  82-100
        """,
        cpu=True,
    )
    assert found["extra_collectives_per_step"] == 10
    assert found["extra_before_update"] == norms
