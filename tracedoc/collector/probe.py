"""Read foreign objects, without ever failing: versions differ and attributes come and go.

This is a part of the hook's border in the user's process: what cannot be read is left out. The wrappers of
DDP and FSDP are among them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from typing import Any

Plain = dict[str, Any]
"""A part of the manifest: text, numbers, truth values, lists and dicts of them."""

MAX_VALUE_LENGTH = 300
"""Longer texts in a part are cut."""


def probe(question: Callable[..., Any], *subjects: Any) -> Any:
    """The answer of ``question`` for the subjects, ``None`` where reading failed in any way."""
    try:
        return question(*subjects)
    except Exception:
        return None


def plain(value: Any) -> Any:
    """Return ``value`` as JSON holds it: enums by name, classes and dtypes by their last name, text cut."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value[:MAX_VALUE_LENGTH]
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in list(value)[:64]]
    name = getattr(value, "name", None)
    if isinstance(name, str):  # an enum
        return name[:MAX_VALUE_LENGTH]
    if type(value).__module__ == "torch":  # a dtype, a device, a layout
        return str(value).removeprefix("torch.")[:MAX_VALUE_LENGTH]
    return type(value).__name__


def attributes(subject: Any, *names: str) -> Plain:
    """Return the named attributes that ``subject`` has, without the leading underscore; ``None`` is left out.

    An attribute that is a method is called.
    """
    found: Plain = {}
    for name in names:
        value = probe(_answer, subject, name)
        if value is not None:
            found[name.lstrip("_")] = value
    return found


def _answer(subject: Any, name: str) -> Any:
    value = getattr(subject, name)
    if callable(value) and not isinstance(value, type):
        value = value()
    return plain(value)


def known(**values: Any) -> Plain:
    """Return the values that are known: ``None``, empty text and empty collections are left out."""
    return {name: value for name, value in values.items() if value is not None and value not in ("", [], {})}


def loaded(module: str) -> Any:
    """Return a module that the process has imported, ``None`` otherwise; nothing is imported."""
    return sys.modules.get(module)


MAX_UNITS = 512
"""At most this many sharded units are listed; all are counted."""

FSDP2_HOMES = (
    ("torch.distributed.fsdp._fully_shard._fully_shard", "FSDPModule"),
    ("torch.distributed._composable.fsdp.fully_shard", "FSDPModule"),
)
"""Where the class that ``fully_shard`` mixes in lives, newest first."""


def original_class(module: Any) -> str:
    """Return the name of the class that the user wrote, below the wrappers of the frameworks."""
    for _ in range(8):
        inner = None
        for name in ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"):
            inner = inner or module._modules.get(name)
        if inner is None and type(module).__name__ in ("DistributedDataParallel", "DeepSpeedEngine"):
            inner = module._modules.get("module")
        if inner is None:
            break
        module = inner
    # fully_shard puts a new class FSDP<Name>(FSDPModule, Name) over the user's.
    mixed_in = [getattr(loaded(home), name, None) for home, name in FSDP2_HOMES]
    bases = type(module).__bases__
    return bases[1].__name__ if len(bases) > 1 and bases[0] in mixed_in else type(module).__name__


def numel(parameter: Any) -> int:
    """The number of elements of a parameter when it is whole."""
    whole = getattr(parameter, "ds_numel", None)  # DeepSpeed ZeRO-3 leaves an empty tensor behind
    return int(whole if whole is not None else parameter.numel())


_DDP_LOGGED = (
    "backend_name",
    "world_size",
    "bucket_cap_bytes",
    "bucket_sizes",
    "rebuilt_bucket_sizes",
    "has_rebuilt_buckets",
    "num_parameter_tensors",
    "total_parameter_size_bytes",
    "dtypes",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "broadcast_buffers",
    "unused_parameter_size",
    "comm_hook",
    "static_graph",
    "avg_forward_compute_time",
    "avg_backward_compute_time",
    "avg_backward_comm_time",
    "avg_backward_compute_comm_overlap_time",
)


def describe_ddp(module: Any) -> Plain:
    """Return the settings of one DistributedDataParallel; DDP's own times are nanoseconds."""
    logged = probe(module._get_ddp_logging_data) or {}
    found = {name: plain(logged[name]) for name in _DDP_LOGGED if logged.get(name) not in (None, "")}
    found |= attributes(module, "static_graph", "find_unused_parameters", "gradient_as_bucket_view")
    cap = probe(lambda: int(module.bucket_bytes_cap))
    return known(
        **found,
        bucket_bytes_cap=cap,
        bucket_cap_is_default=probe(lambda: bool(module.bucket_bytes_cap_default)),
        comm_hooks=probe(lambda: [getattr(hook[0], "__name__", "") for hook in module._comm_hooks]),
        mixed_precision=probe(lambda: _dtypes(module.mixed_precision)),
        group_size=probe(module.process_group.size),
    )


def _dtypes(policy: Any) -> Plain:
    return attributes(
        policy, "param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype", "cast_forward_inputs"
    )


def describe_fsdp1(modules: list[Any]) -> Plain:
    """Return the settings and units of FullyShardedDataParallel (FSDP1), in the order of the model."""
    if not modules:
        return {}
    root = next((m for m in modules if probe(getattr, m, "_is_root")), modules[0])
    place = {id(module): number for number, module in enumerate(root.modules())}
    modules = sorted(modules, key=lambda module: place.get(id(module), len(place)))
    settings = attributes(
        root,
        "sharding_strategy",
        "backward_prefetch",
        "forward_prefetch",
        "limit_all_gathers",
        "_use_orig_params",
    )
    units = [unit for module in modules[:MAX_UNITS] if (unit := probe(_fsdp1_unit, module))]
    return known(
        **settings,
        mixed_precision=probe(lambda: _dtypes(root.mixed_precision)),
        cpu_offload=probe(lambda: bool(root.cpu_offload.offload_params)),
        group_size=probe(root.process_group.size),
        inter_node_group_size=probe(lambda: root._inter_node_pg.size()),
        unit_count=len(modules),
        units=units,
    )


def _fsdp1_unit(module: Any) -> Plain | None:
    handle = module._handle
    if handle is None:  # every parameter of this module belongs to inner units
        return None
    flat = handle.flat_param
    names = list(getattr(flat, "_fqns", ()) or ())
    return known(
        name=original_class(module),
        parameters=int(flat._unpadded_unsharded_size.numel()),
        sharded=int(flat._sharded_size.numel()),
        tensors=len(getattr(flat, "_param_infos", ()) or names),
        dtype=plain(handle._fwd_bwd_param_dtype),
        reduce_dtype=plain(getattr(handle, "_reduce_dtype", None)),
    )


def describe_fsdp2(modules: list[Any]) -> Plain:
    """Return the settings and units of ``fully_shard`` (FSDP2), in order of their wrapping."""
    if not modules:
        return {}
    states = [state for m in modules if (state := probe(m._get_fsdp_state)) is not None]
    root = next((s for s in states if getattr(s, "_is_root", False)), states[0])
    groups = [group for state in states for group in _fsdp2_groups(state)]
    units = [unit for group in groups[:MAX_UNITS] if (unit := probe(_fsdp2_unit, group))]
    first: Any = groups[0] if groups else None
    mesh: Any = probe(getattr, first, "mesh_info")
    return known(
        mixed_precision=probe(lambda: _dtypes(first.mp_policy)),
        offload=probe(lambda: type(first.offload_policy).__name__),
        mesh_kind=probe(lambda: type(mesh).__name__) if mesh is not None else None,
        shard_size=probe(lambda: int(mesh.shard_mesh_size)),
        replicate_size=probe(lambda: int(mesh.replicate_mesh_size)),
        auto_reshard_after_forward=probe(lambda: plain(root._auto_reshard_after_forward)),
        forward_prefetch=probe(lambda: sum(bool(s._states_to_forward_prefetch) for s in states)),
        backward_prefetch=probe(lambda: sum(bool(s._states_to_backward_prefetch) for s in states)),
        unshard_async_op=probe(lambda: bool(first.unshard_async_op)),
        unit_count=len(groups),
        units=units,
    )


def _fsdp2_groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        one = getattr(state, "_fsdp_param_group", None)  # torch before 2.13
        groups = [] if one is None else [one]
    return list(groups)


def _fsdp2_unit(group: Any) -> Plain:
    params = list(group.fsdp_params)
    return known(
        name=plain(getattr(group, "_module_fqn", None)),
        parameters=sum(_product(p._orig_size) for p in params),
        sharded=sum(_product(p.sharded_size) for p in params),
        tensors=len(params),
        dtype=plain(params[0].param_dtype or params[0].orig_dtype) if params else None,
        reduce_dtype=probe(lambda: plain(group.mp_policy.reduce_dtype)),
        reshard_after_forward=probe(lambda: group.post_forward_mesh_info is not None),
    )


def _product(shape: Iterable[int]) -> int:
    result = 1
    for length in shape:
        result *= int(length)
    return result


_DEEPSPEED = (
    "zero_optimization_stage",
    "gradient_accumulation_steps",
    "train_micro_batch_size_per_gpu",
    "train_batch_size",
    "zero_overlap_comm",
    "zero_reduce_scatter",
    "zero_reduce_bucket_size",
    "zero_allgather_bucket_size",
    "zero_allgather_partitions",
    "zero_contiguous_gradients",
    "zero_prefetch_bucket_size",
    "zero_max_live_parameters",
    "zero_max_reuse_distance",
    "zero_param_persistence_threshold",
    "zero_sub_group_size",
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_gradients",
    "communication_data_type",
    "wall_clock_breakdown",
    "fp16_enabled",
    "bfloat16_enabled",
    "gradient_clipping",
)


def describe_deepspeed(engine: Any) -> Plain:
    """Return the effective configuration of a DeepSpeed engine, ``auto`` values resolved."""
    found = attributes(engine, *_DEEPSPEED)
    for name in ("zero_offload_optimizer", "zero_offload_param"):
        offload = probe(getattr(engine, name, lambda: None))
        if offload is not None:
            found[name] = attributes(offload, "device", "pin_memory") or plain(offload)
    return found
