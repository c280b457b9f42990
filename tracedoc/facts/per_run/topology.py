"""Facts about where ranks are: which groups of them leave the fast links inside a node."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tracedoc.facts.catalog import run_fact
from tracedoc.facts.per_rank.sharded_units import NOT_SHARDED
from tracedoc.ranks.run_view import RunView
from tracedoc.ranks.shard_stalls import stall_parts
from tracedoc.spans import Spans
from tracedoc.step.rank_digest import RankDigest, StepDigest
from tracedoc.timeline.collective_roles import Role
from tracedoc.trace.devices import device_peak, spans_hosts
from tracedoc.values import Unknown, Value

FAST_GBPS = 100.0
"""NVLink and xGMI reach more; PCIe, and the network cards of a node, reach about as much as each other."""

NO_LAYERS = Unknown("no layer is split over ranks")


@run_fact("ranks_per_host", unit="count")
def ranks_per_host(run: RunView) -> Value:
    """Most captured ranks of the job on one host; unknown where a trace does not name its host."""
    hosts = [digest.host for digest in run.digests]
    if not hosts or "" in hosts:
        return Unknown("the traces do not name their hosts")
    return max(hosts.count(host) for host in set(hosts))


@run_fact("gathers_leave_node", unit="bool", scope="rank", needs=("collectives",))
def gathers_leave_node(run: RunView) -> dict[str, Value]:
    """Whether parameters are gathered over several nodes, though GPUs inside a node have a faster link.

    By the group that gathers most bytes. A node is a host: NVLink and xGMI end there, but for racks whose
    NVLink spans hosts (GB200, GB300) and boards that differ in it (GH200), for which this is unknown. False
    where a host has one rank of the group only, and where GPUs are joined by PCIe.
    """

    def leaves(digest: RankDigest, step: StepDigest) -> Value:
        if digest.units is None:
            return NOT_SHARDED
        return _leaves_node(run, digest, digest.units.units.gathers.row)

    return run.by_rank(leaves)


@run_fact("layers_leave_node", unit="bool", scope="rank", needs=("collectives", "host_ops"))
def layers_leave_node(run: RunView) -> dict[str, Value]:
    """Whether layers are split over several nodes, though GPUs inside a node have a faster link.

    As :func:`gathers_leave_node`, of the collectives that :func:`layer_exchanges_per_step` counts.
    """

    def leaves(digest: RankDigest, step: StepDigest) -> Value:
        rows = np.flatnonzero(digest.roles == Role.LAYER)
        return _leaves_node(run, digest, rows) if rows.size else NO_LAYERS

    return run.by_rank(leaves)


@run_fact(
    "gather_bandwidth_stall_ms",
    unit="ms",
    scope="rank",
    needs=("kernels", "collectives", "launches"),
    interval="compute waits for a gather whose transfer takes longer than the compute beside it",
)
def gather_bandwidth_stall_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Spans | Unknown:
    """The stalls of :func:`gather_stall_bandwidth_ms`, as intervals: the end of each gap."""
    if digest.units is None:
        return NOT_SHARDED
    parts = stall_parts(run, digest, step)
    if parts is None:
        return Unknown("a CPU trace has no compute stream that stalls")
    return Spans.of(parts.end_ns - parts.bandwidth, parts.end_ns)


def _leaves_node(
    run: RunView, digest: RankDigest, rows: npt.NDArray[np.intp] | npt.NDArray[np.int32]
) -> Value:
    members = _main_group(run, digest, rows)
    hosts = {one.rank: one.host for one in run.digests}
    if not members or any(not hosts.get(rank) for rank in members):
        return Unknown("the hosts of some ranks of the group are not known")
    named = [hosts[rank] for rank in members]
    if len(set(named)) == 1 or len(set(named)) == len(named):
        return False
    if spans_hosts(digest.device):
        return Unknown(f"NVLink of {digest.device} may join several hosts; the capture does not say which")
    peak = device_peak(digest.device)
    if peak is None or peak.link_gbps is None:
        return Unknown(f"how GPUs of the kind {digest.device!r} are joined is not known")
    return peak.link_gbps >= FAST_GBPS


def _main_group(
    run: RunView, digest: RankDigest, rows: npt.NDArray[np.intp] | npt.NDArray[np.int32]
) -> tuple[int, ...]:
    """Return the ranks of the group that moves most bytes in some of a rank's collectives."""
    table = digest.collectives
    sizes = np.bincount(table.kind[rows], weights=np.maximum(table.nbytes[rows], 1), minlength=1)
    by_group: dict[tuple[int, ...], float] = {}
    for kind, size in enumerate(sizes.tolist()):
        if size and kind < len(table.kinds):
            group = table.kinds[kind].group
            by_group[group] = by_group.get(group, 0.0) + size
    return max(by_group, key=lambda group: by_group[group], default=())
