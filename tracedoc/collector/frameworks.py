"""Read how the training is set up from its live objects: model, wrappers, loaders, optimizers, precision."""

from __future__ import annotations

import gc
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tracedoc.collector.probe import (
    FSDP2_HOMES,
    Plain,
    attributes,
    describe_ddp,
    describe_deepspeed,
    describe_fsdp1,
    describe_fsdp2,
    known,
    loaded,
    numel,
    original_class,
    plain,
    probe,
)

SCAN_SECONDS = 1.0
"""The one walk over all Python objects stops after so much processor time: a busy machine cuts nothing."""

MAX_OBJECTS = 16

RECOMPILE_LIMIT = re.compile(r"recompile[ _]limit|cache_size_limit", re.IGNORECASE)
"""How torch's versions say that a function was compiled too often."""

Live = Mapping[str, list[Any]]

_CLASSES: dict[str, tuple[tuple[str, str], ...]] = {
    "ddp": (("torch.nn.parallel.distributed", "DistributedDataParallel"),),
    "fsdp1": (("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"),),
    "fsdp2": FSDP2_HOMES,
    "deepspeed": (("deepspeed.runtime.engine", "DeepSpeedEngine"),),
    "compiled": (("torch._dynamo.eval_frame", "OptimizedModule"),),
    "checkpointed": (("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "CheckpointWrapper"),),
    "module": (("torch.nn.modules.module", "Module"),),
    "loader": (("torch.utils.data.dataloader", "DataLoader"),),
    "loader_iterator": (("torch.utils.data.dataloader", "_BaseDataLoaderIter"),),
    "optimizer": (("torch.optim.optimizer", "Optimizer"),),
    "scaler": (("torch.amp.grad_scaler", "GradScaler"), ("torch.cuda.amp.grad_scaler", "GradScaler")),
    "mesh": (("torch.distributed.device_mesh", "DeviceMesh"),),
    "accelerator": (("accelerate.accelerator", "Accelerator"),),
    "trainer_arguments": (("transformers.training_args", "TrainingArguments"),),
    "lightning_trainer": (
        ("lightning.pytorch.trainer.trainer", "Trainer"),
        ("pytorch_lightning.trainer.trainer", "Trainer"),
    ),
}
"""Where the classes live. Only modules that the process has imported are looked into."""


def find_live() -> dict[str, list[Any]]:
    """Return the live objects of each kind, found in one walk over what the garbage collector tracks.

    A subclass of several kinds counts for each. The walk takes some 30 ms for a million objects and is
    cut after :data:`SCAN_SECONDS`.
    """
    classes = {
        kind: found
        for kind, places in _CLASSES.items()
        if (found := tuple(c for place in places if isinstance(c := _class_at(*place), type)))
    }
    kinds_by_type: dict[type, tuple[str, ...]] = {}
    live: dict[str, list[Any]] = {kind: [] for kind in classes}
    deadline = time.thread_time() + SCAN_SECONDS
    for number, thing in enumerate(gc.get_objects()):
        cls = type(thing)
        kinds = kinds_by_type.get(cls)
        if kinds is None:
            kinds = tuple(kind for kind, wanted in classes.items() if issubclass(cls, wanted))
            kinds_by_type[cls] = kinds
        for kind in kinds:
            live[kind].append(thing)
        if number & 0xFFFF == 0xFFFF and time.thread_time() > deadline:
            break
    return live


def _class_at(module: str, name: str) -> Any:
    return getattr(loaded(module), name, None)


def describe(live: Live) -> Plain:
    """Return the configuration of the training, as far as its live objects show it."""

    def first(kind: str) -> Any:
        return next(iter(live[kind]), None)

    parts: dict[str, Callable[[], Any]] = {
        "model": lambda: describe_model(live),
        "ddp": lambda: [describe_ddp(one) for one in live["ddp"][:MAX_OBJECTS]],
        "fsdp1": lambda: describe_fsdp1(live["fsdp1"]),
        "fsdp2": lambda: describe_fsdp2(live["fsdp2"]),
        "deepspeed": lambda: [describe_deepspeed(one) for one in live["deepspeed"][:1]],
        "loaders": lambda: describe_loaders(live, MAX_OBJECTS),
        "optimizers": lambda: [describe_optimizer(one) for one in live["optimizer"][:MAX_OBJECTS]],
        "precision": lambda: describe_precision(live),
        "compile": lambda: describe_compile(live),
        "meshes": lambda: describe_meshes(live["mesh"]),
        "groups": process_groups,
        "accelerate": lambda: attributes(first("accelerator"), *_OF_ACCELERATE),
        "trainer": lambda: attributes(first("trainer_arguments"), *_OF_TRAINER),
        "lightning": lambda: describe_lightning(first("lightning_trainer")),
    }
    return known(**{name: probe(question) for name, question in parts.items()})


# -- the model


def describe_model(live: Live) -> Plain:
    """Return the sizes of the model and the class of its repeated blocks.

    Elements are counted whole, also where a rank holds a part of them.
    """
    root = largest_root(live)
    if root is None:
        return {}
    parameters = list(root.parameters())
    trained = [p for p in parameters if p.requires_grad]
    dtypes: Counter[str] = Counter()
    for parameter in parameters:
        dtypes[str(plain(parameter.dtype))] += numel(parameter)
    modules = list(root.modules())
    whole = sum(map(numel, parameters))
    if live.get("fsdp1"):  # its flat parameters are the rank's own parts
        whole = sum(unit["parameters"] for unit in describe_fsdp1(live["fsdp1"])["units"]) or whole
    return known(
        name=original_class(root),
        parameters=whole,
        trained_parameters=sum(map(numel, trained)),
        parameter_tensors=len(parameters),
        trained_tensors=len(trained),
        parameter_dtypes=dict(dtypes.most_common(8)),
        devices=sorted({str(p.device) for p in parameters})[:8],
        modules=len(modules),
        block=_repeated_block(modules),
        gradient_checkpointing=_checkpoints(live, modules),
        lora=any(type(m).__module__.startswith("peft.tuners") for m in modules) or None,
    )


def largest_root(live: Live) -> Any:
    """The outermost module with most elements, ``None`` where none holds parameters."""
    roots = _roots(live)[:MAX_OBJECTS]
    return max(roots, key=lambda root: sum(numel(p) for p in root.parameters()), default=None)


def _roots(live: Live) -> list[Any]:
    """Return the outermost modules that hold parameters; wrappers hold what they wrap."""
    modules = live.get("module", [])
    inner = {id(child) for module in modules for child in (probe(_children, module) or ())}
    return [m for m in modules if id(m) not in inner and probe(_has_parameters, m)]


def _children(module: Any) -> list[Any]:
    return list(module._modules.values())


def _has_parameters(module: Any) -> bool:
    return next(module.parameters(), None) is not None


def _repeated_block(modules: Iterable[Any]) -> Plain:
    """Return the class of which a list holds most parameters: the layer of a transformer."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for holder in modules:
        if type(holder).__name__ not in ("ModuleList", "Sequential", "ModuleDict"):
            continue
        for child in holder._modules.values():
            if child is not None and (size := sum(map(numel, child.parameters()))):
                name = original_class(child)
                counts[name] += 1
                sizes[name] += size
    repeated = {name: size for name, size in sizes.items() if counts[name] > 1}
    if not repeated:
        return {}
    name = max(repeated, key=lambda one: repeated[one])
    return {"class": name, "count": counts[name], "parameters": sizes[name] // counts[name]}


def _checkpoints(live: Live, modules: Iterable[Any]) -> bool:
    return bool(live.get("checkpointed")) or any(
        getattr(m, "gradient_checkpointing", None) is True for m in modules
    )


# -- optimizer, precision, compilation


def describe_optimizer(optimizer: Any) -> Plain:
    """Return the class of an optimizer and the switches that choose how its step runs."""
    groups = list(optimizer.param_groups)
    parameters = [p for group in groups for p in group["params"]]
    first = groups[0] if groups else {}
    return known(
        name=type(optimizer).__name__,
        inner=probe(lambda: type(optimizer.optimizer).__name__),
        groups=len(groups),
        tensors=len(parameters),
        elements=sum(map(numel, parameters)),
        **{
            name: plain(first[name])
            for name in ("fused", "foreach", "capturable", "amsgrad")
            if name in first
        },
    )


def describe_precision(live: Live) -> Plain:
    """Return the switches of numeric precision and of the libraries that choose kernels."""
    torch = loaded("torch")
    scalers = live.get("scaler", [])
    return known(
        float32_matmul=probe(torch.get_float32_matmul_precision),
        allow_tf32=probe(lambda: bool(torch.backends.cuda.matmul.allow_tf32)),
        cudnn_tf32=probe(lambda: bool(torch.backends.cudnn.allow_tf32)),
        cudnn_benchmark=probe(lambda: bool(torch.backends.cudnn.benchmark)),
        deterministic=probe(lambda: bool(torch.are_deterministic_algorithms_enabled())),
        anomaly_detection=probe(lambda: bool(torch.is_anomaly_enabled())),
        default_dtype=probe(lambda: plain(torch.get_default_dtype())),
        grad_scaler=any(probe(type(s).is_enabled, s) for s in scalers) or None,
    )


def describe_compile(live: Live) -> Plain:
    """The work of torch.compile: how many graphs it made, and where it broke them."""
    counters: Any = getattr(loaded("torch._dynamo.utils"), "counters", None)
    counted = {
        "graphs": probe(lambda: int(counters["stats"]["unique_graphs"])),
        "graph_breaks": probe(lambda: int(sum(counters["graph_break"].values()))),
        "recompile_limit_hits": probe(lambda: limit_hits(counters["unimplemented"])) or None,
    }
    modules = len(live.get("compiled", ())) or None
    if not modules and not counted["graphs"]:
        return {}
    return known(compiled_modules=modules, **counted)


def limit_hits(refused: Mapping[str, int]) -> int:
    """How often Dynamo gave a function up because it had compiled it too often already."""
    return sum(count for reason, count in refused.items() if RECOMPILE_LIMIT.search(reason))


# -- process groups, meshes, trainers


def describe_meshes(meshes: list[Any]) -> list[Plain]:
    """Return the shapes of the device meshes and the names of their dimensions, each once."""
    found: list[Plain] = []
    for mesh in meshes:
        shape = known(
            shape=probe(lambda mesh: [int(length) for length in mesh.shape], mesh),
            names=plain(getattr(mesh, "mesh_dim_names", None)),
            device=plain(getattr(mesh, "device_type", None)),
        )
        if shape not in found and len(found) < MAX_OBJECTS:
            found.append(shape)
    return found


def process_groups() -> list[Plain]:
    """Return the process groups that this rank belongs to: name, description, backend and ranks."""
    c10d = loaded("torch.distributed.distributed_c10d")
    world = getattr(c10d, "_world", None)
    if world is None:
        return []
    found = []
    for group, (backend, _) in list(world.pg_map.items())[:64]:
        ranks = sorted(int(rank) for rank in world.pg_group_ranks.get(group, {}))
        found.append(
            known(
                name=plain(world.pg_names.get(group)),
                description=plain(probe(getattr, group, "group_desc")),
                backend=plain(backend),
                size=len(ranks) or None,
                ranks=ranks[:64],
            )
        )
    return found


_OF_ACCELERATE = (
    "distributed_type",
    "mixed_precision",
    "gradient_accumulation_steps",
    "num_processes",
    "split_batches",
    "dispatch_batches",
    "even_batches",
)
_OF_TRAINER = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "bf16",
    "fp16",
    "tf32",
    "torch_compile",
    "optim",
    "ddp_bucket_cap_mb",
    "ddp_find_unused_parameters",
    "ddp_broadcast_buffers",
    "dataloader_num_workers",
    "dataloader_pin_memory",
    "dataloader_persistent_workers",
    "dataloader_prefetch_factor",
    "logging_steps",
    "logging_nan_inf_filter",
    "group_by_length",
    "torch_empty_cache_steps",
)
"""The settings of an ``Accelerator`` and of ``TrainingArguments`` that decide about speed."""


def describe_lightning(trainer: Any) -> Plain:
    """The settings of a Lightning Trainer that decide about speed."""
    found = attributes(
        trainer, "precision", "accumulate_grad_batches", "num_devices", "num_nodes", "world_size"
    )
    strategy = getattr(trainer, "strategy", None)
    return known(**found, strategy=type(strategy).__name__ if strategy is not None else None)


def describe_loaders(live: Mapping[str, list[Any]], most: int) -> list[Plain]:
    """Return the settings of the live DataLoaders, ``most`` of them at most.

    ``for batch in DataLoader(...)`` keeps only the iterator, so without a DataLoader those are described.
    """
    loaders = live.get("loader", [])[:most]
    if loaders:
        return [describe_loader(one) for one in loaders]
    return [describe_iterator(one) for one in live.get("loader_iterator", [])[:most]]


_OF_LOADER = (
    "num_workers",
    "pin_memory",
    "persistent_workers",
    "prefetch_factor",
    "drop_last",
    "timeout",
    "in_order",
)


def describe_loader(loader: Any) -> Plain:
    """Return the settings of one DataLoader."""
    own = _describe(loader, "", probe(getattr, loader, "batch_sampler"), getattr(loader, "sampler", None))
    return known(
        **(own | attributes(loader, "batch_size")),
        batches=probe(len, loader),
        collate=probe(lambda: getattr(loader.collate_fn, "__name__", type(loader.collate_fn).__name__)),
        start_method=probe(lambda: loader.multiprocessing_context.get_start_method()),
    )


def describe_iterator(iterator: Any) -> Plain:
    """Return the settings that the iterator of a DataLoader has taken over from it."""
    batches: Any = getattr(iterator, "_index_sampler", None)
    return _describe(iterator, "_", batches, getattr(batches, "sampler", batches))


def _describe(owner: Any, mark: str, batches: Any, sampler: Any) -> Plain:
    """The settings that a loader and its iterator both have; the iterator's begin with a ``mark``."""
    return known(
        batch_size=probe(lambda: int(batches.batch_size)),
        **attributes(owner, *(mark + name for name in _OF_LOADER)),
        dataset=type(getattr(owner, f"{mark}dataset", None)).__name__,
        sampler=type(sampler).__name__,
        sampler_replicas=probe(getattr, sampler, "num_replicas"),
    )
