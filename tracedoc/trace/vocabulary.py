"""Translate the names that vendors, frameworks and torch versions write into one vocabulary.

Everything here looks at a name alone and is meant to be called once per distinct name. The knowledge
stands in tables; a new vendor is a new row. Kernels have a file of their own.
"""

from __future__ import annotations

import re
from enum import Enum
from functools import lru_cache

import msgspec

from tracedoc.trace.columns import Kind
from tracedoc.trace.kernels import is_communication_kernel

# --- Categories -------------------------------------------------------------------------------------

_CATEGORIES = {
    Kind.CPU_OP: "cpu_op Operator",  # those with a capital are of Kineto of 2020 and 2021
    Kind.ANNOTATION: "user_annotation",
    Kind.GPU_ANNOTATION: "gpu_user_annotation",
    Kind.KERNEL: "kernel Kernel",
    Kind.MEMCPY: "gpu_memcpy Memcpy",
    Kind.MEMSET: "gpu_memset Memset",
    Kind.RUNTIME: "cuda_runtime cuda_driver xpu_runtime xpu_driver mtia_runtime privateuse1_runtime "
    "privateuse1_driver Runtime",
    Kind.SYNC: "cuda_sync cuda_event xpu_sync",
    Kind.PYTHON: "python_function",
    Kind.OVERHEAD: "overhead",
    Kind.INSTANT: "cpu_instant_event",
    Kind.ACCELERATOR: "cuda_profiler_range xpu_scope_profiler mtia_ccp_events mtia_insight glow_runtime "
    "hpu_op collective_comm",
    # Known, and not kept: the record window, counters, flows, bookkeeping of the profiler.
    None: "Trace external_correlation mtia_counters hardware_counters ac2g fwdbwd",
}
KINDS = {category: kind for kind, categories in _CATEGORIES.items() for category in categories.split()}
"""Every category Kineto writes; ``None`` marks those that a :class:`Trace` does not keep."""


def kind_of(category: str) -> Kind | None:
    """The kind of events of a Kineto category, ``None`` for unknown ones and those not kept."""
    return KINDS.get(category)


def event_kind(category: str, name: str) -> Kind | None:
    """Return the kind of an event by its category and name.

    Until late 2021 host ranges (ProfilerStep, optimizer, DataLoader) had the category of operators.
    """
    kind = KINDS.get(category)
    if kind is Kind.CPU_OP and _HOST_RANGE.match(name):
        return Kind.ANNOTATION
    return kind


_HOST_RANGE = re.compile(
    r"ProfilerStep\s?#\d+$|Optimizer\.(?:step|zero_grad)#|enumerate\(Data(?:Loader|Pipe)\)#|(?:nccl|gloo):"
)

# --- Collectives ------------------------------------------------------------------------------------

SYMMETRIC_OPS = frozenset({"all_reduce", "reduce_scatter", "all_gather"})
"""Collectives in which no rank can end before all have started."""

P2P_OPS = frozenset({"send", "recv", "send_recv"})

# Longest first: "reducescatter" holds both "reduce" and "scatter".
_OP_WORDS: tuple[tuple[str, str], ...] = (
    ("allreduce", "all_reduce"),
    ("crossdevicereduce", "all_reduce"),
    ("quickreduce", "all_reduce"),
    ("reducescatter", "reduce_scatter"),
    ("allgather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("sendrecv", "send_recv"),
    ("broadcast", "broadcast"),
    ("barrier", "barrier"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("reduce", "reduce"),
    ("send", "send"),
    ("recv", "recv"),
)
_OP_OF_WORD = dict(_OP_WORDS)

_COLLECTIVE_NAME = re.compile(
    r"(?:sparse|monitored)?(allreduce|reducescatter|allgather|alltoall|broadcast|barrier|gather|scatter|reduce|"
    r"send|recv)(?:base|v|single|intotensor|tensor|coalesced|sparse|oop|out|anysource|barrier)*$"
)
_PEERS = re.compile(r" \d+(?:->|<-)\d+$")
_ANNOTATION = re.compile(r"^(nccl|gloo|ucc|mpi|xccl|hccl|rccl):(.+)$")
_C10D_OP = re.compile(r"^(?:c10d|_?c10d_functional(?:_autograd)?)::(\w+)$")
_DEEP_EP_EXCHANGE = re.compile(r"deep_ep::\w+::(?:dispatch|combine)|AllToAllV", re.IGNORECASE)


@lru_cache(maxsize=65536)
def collective_op(name: str) -> str | None:
    """Return the operation of a collective under one name, or ``None`` if ``name`` is no collective.

    Takes a kernel name, c10d's ``Collective name`` (``_allgather_base``), a c10d operator
    (``c10d::allreduce_``) or an annotation (``nccl:all_reduce``). "unknown" is communication whose
    operation the name hides, as ``ncclDevKernel_Generic`` or ``nccl:coalesced`` do.
    """
    annotation = _ANNOTATION.match(name)
    if annotation:
        if "barrier" in annotation.group(2):
            return "barrier"
        return _op_of_name(annotation.group(2)) or "unknown"
    operator = _C10D_OP.match(name)
    if operator:
        return _op_of_name(operator.group(1))
    if is_communication_kernel(name):
        if _DEEP_EP_EXCHANGE.search(name):
            return "all_to_all"
        squeezed = name.replace("(anonymous namespace)", "").split("(", 1)[0].replace("_", "").lower()
        return next((op for word, op in _OP_WORDS if word in squeezed), "unknown")
    return _op_of_name(name)


def _op_of_name(name: str) -> str | None:
    squeezed = _PEERS.sub("", name).replace("_", "").lower()
    match = _COLLECTIVE_NAME.match(squeezed)
    return _OP_OF_WORD[match.group(1)] if match else None


def gloo_op(name: str) -> str | None:
    """Return the operation of a ``gloo:`` annotation, ``None`` for any other name."""
    return collective_op(name) if name.startswith("gloo:") else None


def nccl_annotation(name: str) -> str | None:
    """Return the operation of an ``nccl:`` annotation, ``None`` for any other name."""
    return collective_op(name) if name.startswith("nccl:") else None


def busbw_factor(op: str, ranks: int) -> float:
    """The factor from ``bytes / time`` to bus bandwidth, as nccl-tests define it."""
    if ranks <= 0:
        return 0.0
    if op == "all_reduce":
        return 2.0 * (ranks - 1) / ranks
    if op in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) / ranks
    return 1.0


_NAMES_BY_BYTES = {
    1: "bool, byte, char, unsigned char, signed char, uint8, int8, qint8, quint8, "
    "float8_e4m3fn, float8_e5m2, float8_e4m3fnuz, float8_e5m2fnuz, float8_e8m0fnu, float4_e2m1fn_x2",
    2: "short, short int, uint16, int16, half, float16, bfloat16",
    4: "int, int32, uint32, unsigned int, qint32, float, float32, complexhalf, complex<half>",
    8: "long, long int, long long, int64, uint64, unsigned long, double, float64, "
    "complexfloat, complex<float>",
    16: "complexdouble, complex<double>",
}
DTYPE_BYTES = {name: size for size, names in _NAMES_BY_BYTES.items() for name in names.split(", ")}
"""Size of one element; names in lower case and without ``c10::``."""


@lru_cache(maxsize=1024)
def dtype_bytes(name: str) -> int | None:
    """Return the size of one element of a c10 type (``BFloat16``) or ``Input type`` (``c10::Half``)."""
    return DTYPE_BYTES.get(name.replace("c10::", "").strip().lower())


def payload_bytes(op: str, in_elements: int | None, out_elements: int | None, dtype: str) -> int | None:
    """Return the S of nccl-tests: the whole buffer, the output of a gather, the input of a scatter.

    For all-to-all and the rest it is the larger of both sides that are known.
    """
    size = dtype_bytes(dtype)
    if size is None:
        return None
    if op == "all_gather":
        elements = out_elements
    elif op == "reduce_scatter":
        elements = in_elements
    else:
        known = [n for n in (in_elements, out_elements) if n is not None]
        elements = max(known) if known else None
    return None if elements is None else elements * size


# --- Runtime calls and copies -----------------------------------------------------------------------


class RuntimeRole(str, Enum):
    """What a call into the CUDA, HIP or Level Zero runtime does."""

    LAUNCH = "launch"
    GRAPH_LAUNCH = "graph_launch"
    COPY = "copy"
    SYNC = "sync"  # blocks the host until the device is done
    ALLOCATION = "allocation"  # may block; stream-ordered pool allocations do not and are not here
    EVENT = "event"
    MODULE_LOAD = "module_load"
    OTHER = "other"


_RUNTIME_TABLE: tuple[tuple[RuntimeRole, re.Pattern[str]], ...] = (
    (RuntimeRole.GRAPH_LAUNCH, re.compile(r"(?:cuda|hip|cu)GraphLaunch")),
    (RuntimeRole.OTHER, re.compile(r"(?:cuda|hip|cu)LaunchHostFunc")),
    (
        RuntimeRole.LAUNCH,
        re.compile(r"(?:cuda|hip|cu)(?:Ext)?(?:Module)?Launch|.*AppendLaunch|.*EnqueueKernelLaunch"),
    ),
    (
        RuntimeRole.COPY,
        re.compile(r"(?:cuda|hip|cu)Mem(?:cpy|set|PrefetchAsync)|.*AppendMemory(?:Copy|Fill)"),
    ),
    (
        RuntimeRole.SYNC,
        re.compile(r"(?:cuda|hip|cu)(?:Device|Stream|Event|Ctx|Thread)Synchronize|ze\w+Synchronize"),
    ),
    (RuntimeRole.OTHER, re.compile(r"(?:cuda|hip|cu)(?:Malloc|Free|MemAlloc|MemFree)(?:FromPool)?Async")),
    (
        RuntimeRole.ALLOCATION,
        re.compile(
            r"(?:cuda|hip)(?:Ext)?(?:Malloc|Free)|(?:cuda|hip)Host(?:Alloc|Malloc|Free|Register|Unregister)|"
            r"(?:cu|hip)Mem(?:Alloc|Free|Create|Release|Map|Unmap|SetAccess|HostAlloc|HostRegister|"
            r"AddressReserve|AddressFree)"
        ),
    ),
    (RuntimeRole.EVENT, re.compile(r"(?:cuda|hip|cu)(?:Event|StreamWaitEvent)")),
    (RuntimeRole.MODULE_LOAD, re.compile(r"(?:cu|hip|cuda)(?:Module|Library)(?:Load|Unload)")),
)


_RUNTIME_BEGINS = ("cuda", "hip", "cu", "ze")
_RUNTIME_HOLDS = ("Append", "EnqueueKernelLaunch")


def runtime_role(name: str) -> RuntimeRole:
    """The role of a runtime or driver call; version suffixes (``_v11060``) do not matter."""
    # Most names are those of kernels and operators, of which there may be a million.
    if name.startswith(_RUNTIME_BEGINS) or any(part in name for part in _RUNTIME_HOLDS):
        return _runtime_role(name)
    return RuntimeRole.OTHER


def launches(name: str) -> bool:
    """True for a call that launches a kernel or a graph."""
    return runtime_role(name) in (RuntimeRole.LAUNCH, RuntimeRole.GRAPH_LAUNCH)


@lru_cache(maxsize=4096)
def _runtime_role(name: str) -> RuntimeRole:
    return next((role for role, pattern in _RUNTIME_TABLE if pattern.match(name)), RuntimeRole.OTHER)


class CopyKind(msgspec.Struct, frozen=True):
    """Where a copy goes: direction HtoD, DtoH, DtoD, PtoP, HtoH or "unknown"; and from which memory.

    Memories are "Pageable", "Pinned", "Device"... on CUDA; ROCm says only "Host"; "" if not named.
    """

    direction: str
    source_memory: str = ""


_CUDA_COPY = re.compile(r"Memcpy (\w+)(?: \((.+?) -> .+?\))?")
_SPELT_COPY = re.compile(r"(Host|Device|Peer)To(Host|Device|Peer)", re.IGNORECASE)
_DIRECTIONS = frozenset({"HtoD", "DtoH", "DtoD", "PtoP", "HtoH"})


@lru_cache(maxsize=1024)
def copy_kind(name: str) -> CopyKind:
    """The direction of a copy and the memory it reads (``Memcpy HtoD (Pageable -> Device)``)."""
    match = _CUDA_COPY.match(name)
    if match:
        direction = match.group(1).replace("A", "D")  # CUDA arrays live on the device.
        known = direction if direction in _DIRECTIONS else "unknown"
        return CopyKind(known, match.group(2) or "")
    spelt = _SPELT_COPY.search(name)
    if spelt:
        source, target = spelt.group(1).capitalize(), spelt.group(2).capitalize()
        return CopyKind(f"{source[0]}to{target[0]}", source)
    return CopyKind("unknown")


# --- Host ranges ------------------------------------------------------------------------------------

_STEP = re.compile(r"ProfilerStep\s?#(\d{1,9})$")  # more digits are damage, and fit no column
# With the optimizer "none" the gradients go to one outside; a dense_embedding lookup's do always.
_OPTIMIZER_STEP = re.compile(r"Optimizer\.step#(\w+)\.step$")
_DATA_LOADER = re.compile(r"enumerate\((DataLoader|DataPipe)\)#(\w*)")
_OLD_BACKWARD = re.compile(
    r"\w*Backward\d*$|torch::autograd::(?:AccumulateGrad|CopyBackwards|CopySlices|GraphRoot)$"
)
_COMPILED_REGION = re.compile(r"Torch-Compiled Region: (?:!\d+/)?(\d{1,9})/(\d{1,9})")


def step_number(name: str) -> int | None:
    """Return the N of ``ProfilerStep#N``, ``None`` for any other name."""
    match = _STEP.match(name)
    return int(match.group(1)) if match else None


def is_step(name: str) -> bool:
    """True for ``ProfilerStep#N``."""
    return _STEP.match(name) is not None


def optimizer_step_class(name: str) -> str | None:
    """Return the class in ``Optimizer.step#AdamW.step``, ``None`` for any other name."""
    match = _OPTIMIZER_STEP.match(name)
    return match.group(1) if match else None


def is_of_loop(name: str) -> bool:
    """True for a range that only the training loop writes: a step, or one of the optimizer."""
    return is_step(name) or optimizer_step_class(name) is not None


updates_in_backward_pass = re.compile(
    r"fbgemm::split_embedding_(\w+_)?codegen_lookup_(?!none_)\w+_function"
).match
"""True for FBGEMM's lookup of embeddings whose optimizer runs in the backward pass."""


def is_zero_grad(name: str) -> bool:
    """True for ``Optimizer.zero_grad``."""
    return name.startswith("Optimizer.zero_grad#")


def data_loader(name: str) -> str | None:
    """How a range fetches data: "single_process", "workers" or "pipe"; ``None`` for others."""
    match = _DATA_LOADER.match(name)
    if not match:
        return None
    if match.group(1) == "DataPipe":
        return "pipe"
    return "workers" if "MultiProcessing" in match.group(2) else "single_process"


def is_backward_node(name: str) -> bool:
    """True for a node of the backward graph.

    Traces before torch 1.9 have no ``evaluate_function`` ranges, only the nodes' own names.
    """
    return name.startswith("autograd::engine::evaluate_function") or _OLD_BACKWARD.match(name) is not None


is_cpu_operator = re.compile(
    r"\w+::.*(?:mkldnn|onednn|fbgemm|_for_cpu|_cpu$)|(?:mkldnn|onednn|quantized)::"
).match
"""True for an operator that exists on CPUs alone: those of oneDNN and FBGEMM, and ``..._cpu``."""

is_product = re.compile(r"aten::(?:add)?mm$").match
"""True for a product of two matrices, whatever device it runs on."""

is_compile_range = re.compile(
    r".*\(dynamo_timed\)$|_compile\.compile_inner|compile_fx|entire_frame_compile|backend_compile|dynamo$"
).match
"""True for compilation (Dynamo, Inductor), not for running compiled code."""

is_script_range = re.compile(
    r"forward$|fallback_function$|<(?:forward|backward) op>$|torch::jit::\(anonymous namespace\)::"
).match
"""True for an operator's range in which TorchScript runs a graph: of a module, of a part, or backward.

One of a scripted function has that function's name and is not known by it.
"""

is_generated_kernel = re.compile(
    r"fused_[a-z_]|nvfuser_|(?:void )?(?:nvfuser::|CudaCodeGen::)|triton_[a-z]+_fused"
).match
"""True for a kernel that a fuser generated while the job ran: TorchScript's, nvFuser's, or Inductor's."""


def compiled_region(name: str) -> tuple[int, int] | None:
    """Return the numbers of a region of compiled code, and of its recompilation, ``None`` for other names."""
    match = _COMPILED_REGION.match(name)
    return (int(match[1]), int(match[2])) if match else None


is_gc_range = re.compile(r"Python GC|gc\.collect|Garbage [Cc]ollect|gc:").match
"""True for Python's garbage collection."""

_WORKS = re.compile(
    r"(?:^|/)(?:torch/(?!serialization|storage|_tensor_str|package|multiprocessing|profiler|"
    r"distributed/checkpoint|utils/(?!checkpoint))"
    r"|deepspeed/(?!checkpoint|monitor|profiling|runtime/(?:checkpoint_engine|dataloader)))"
)


def works_for_the_model(frame: str) -> bool:
    """True for a Python frame of torch or of DeepSpeed's engine, unless it loads, saves, prints or records.

    What does one of those does it for its caller, whose time it is.
    """
    return _WORKS.search(frame) is not None
