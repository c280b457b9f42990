"""What a step takes without offloading, on lanes whose answer is worked out by hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tracedoc
from tracedoc.predicted import NotPredicted, Predicted
from tracedoc.testing import TraceBuilder, parse_lanes


def predicted(folder: Path, lanes: str, *, sized: bool = True):
    """The step without offloading; of copies that are not ``sized`` no size is recorded, as on AMD."""
    for rank, builder in enumerate(parse_lanes(lanes, ranks=2)):
        path = builder.write(folder / f"rank-{rank}.json")
        if not sized:
            path.write_text(re.sub(r'"bytes": *\d+,? *', "", path.read_text()))
    (one,) = tracedoc.predict([folder], ["no-offload"]).alone
    return one


@pytest.mark.parametrize("sized", [True, False])
def test_copies_and_the_cpu_optimizer_become_an_update_on_the_gpu(tmp_path, sized):
    """Of 160 ms stay 90 of compute; the update takes 10, 20 or 35 % of the 10 ms that gradients travel."""
    one = predicted(
        tmp_path,
        """
        compute  0-90
        copy     90-100 512MiB DtoH   150-160 512MiB HtoD
        host     100-150 optimizer
        """,
        sized=sized,
    )
    assert isinstance(one, Predicted)
    low, likely, high = one.step_ms
    assert low == pytest.approx(91.0, abs=0.3)
    assert likely == pytest.approx(92.0, abs=0.8)
    assert high == pytest.approx(93.5, abs=1.6)
    assert low < likely < high


def test_an_update_that_the_gpu_computes_today_is_no_further_one(tmp_path):
    """Of 161 ms stay 90 of compute and 50 of the optimizer on the GPU."""
    for rank in range(2):
        builder = TraceBuilder(rank, 2)
        for index in range(4):
            start = 1.0 + 161.0 * index
            builder.step(index, start - 0.5, start + 160.4)
            builder.kernel("nvjet_tst_128x256", start, start + 90, launch_ms=start - 0.2)
            builder.copy("DtoH", start + 90, start + 100, 512 << 20, launch_ms=start - 0.16)
            builder.optimizer(start - 0.14, start - 0.1)
            builder.kernel(
                "multi_tensor_apply_kernel<FusedAdam>", start + 100, start + 150, launch_ms=start - 0.12
            )
            builder.copy("HtoD", start + 150, start + 160, 512 << 20, launch_ms=start - 0.08)
            builder.runtime("cudaDeviceSynchronize", start - 0.05, start + 160.01)
        builder.write(tmp_path / f"rank-{rank}.json")
    (one,) = tracedoc.predict([tmp_path], ["no-offload"]).alone
    assert isinstance(one, Predicted)
    assert one.step_ms == pytest.approx((140.0, 140.0, 140.0), abs=0.5)


def test_copies_beside_compute_saved_nothing(tmp_path):
    """Half of the gradients travel beside the rest of the compute; the update is what is left of them."""
    one = predicted(
        tmp_path,
        """
        compute  0-100
        copy     50-60 512MiB DtoH   70-80 512MiB HtoD
        """,
    )
    assert isinstance(one, Predicted)
    assert one.gain_ms[2] <= 0.5


@pytest.mark.parametrize("sized", [True, False])
def test_a_batch_is_no_offloading(tmp_path, sized):
    one = predicted(
        tmp_path,
        """
        copy     0-10 512MiB HtoD
        compute  10-100
        """,
        sized=sized,
    )
    assert isinstance(one, NotPredicted)
    assert one.reason == "nothing is offloaded in the step"
