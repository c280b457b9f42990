"""What NVML says of a GPU, asked of a stand-in: no GPU takes part in these tests."""

from __future__ import annotations

import ctypes
from typing import Any

from tracedoc.collector.devices import describe_device


class Fabric(ctypes.Structure):
    """The part that is read of the structure that NVML fills."""

    _fields_ = (("clusterUuid", ctypes.c_uint8 * 16), ("cliqueId", ctypes.c_uint32))


class Nvml:
    """The part of pynvml that is asked, for a GPU of an NVLink fabric with 18 links, two of them down."""

    c_nvmlGpuFabricInfoV_t = Fabric  # noqa: N815

    def nvmlSystemGetDriverVersion(self) -> bytes:  # noqa: N802
        return b"550.54.15"

    def nvmlDeviceGetUUID(self, handle: object) -> str:  # noqa: N802
        return "GPU-1"

    def nvmlDeviceGetPowerManagementLimit(self, handle: object) -> int:  # noqa: N802
        return 700_000

    def nvmlDeviceGetNvLinkState(self, handle: object, link: int) -> int:  # noqa: N802
        return 0 if link in (3, 4) else 1

    def nvmlDeviceGetGpuFabricInfoV(self, handle: object, fabric: Any) -> int:  # noqa: N802
        fabric._obj.clusterUuid[:] = range(16)
        fabric._obj.cliqueId = 7
        return 0


def test_what_does_not_change_is_told_once() -> None:
    assert describe_device(Nvml(), object()) == {
        "driver": "550.54.15",
        "uuid": "GPU-1",
        "power_limit_w": 700.0,
        "nvlinks_active": 16,
        "fabric_cluster": "000102030405060708090a0b0c0d0e0f",
        "fabric_clique": 7,
    }


def test_a_gpu_outside_any_fabric_has_no_ids() -> None:
    class Alone(Nvml):
        def nvmlDeviceGetGpuFabricInfoV(self, handle: object, fabric: Any) -> int:  # noqa: N802
            return 0

    described = describe_device(Alone(), object())
    assert "fabric_cluster" not in described
    assert "fabric_clique" not in described


def test_a_driver_that_answers_nothing_is_left_out() -> None:
    assert describe_device(object(), object()) == {}
