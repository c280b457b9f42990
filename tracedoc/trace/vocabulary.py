"""Translate the names that vendors, frameworks and torch versions write into one vocabulary.

Everything here looks at a name alone and is meant to be called once per distinct name. The knowledge
stands in tables; a new vendor is a new row. Kernels and devices have files of their own, reached
from here.
"""

from __future__ import annotations

import re
from enum import Enum
from functools import lru_cache

import msgspec

from tracedoc.trace.columns import Kind
from tracedoc.trace.devices import DEVICE_PEAKS as DEVICE_PEAKS
from tracedoc.trace.devices import DevicePeak as DevicePeak
from tracedoc.trace.devices import device_peak as device_peak
from tracedoc.trace.kernels import COMMUNICATION_KERNELS as COMMUNICATION_KERNELS
from tracedoc.trace.kernels import KernelCategory as KernelCategory
from tracedoc.trace.kernels import is_communication_kernel
from tracedoc.trace.kernels import is_rocm_copy_kernel as is_rocm_copy_kernel
from tracedoc.trace.kernels import kernel_category as kernel_category

# --- Categories -------------------------------------------------------------------------------------

KINDS: dict[str, Kind | None] = {
    "cpu_op": Kind.CPU_OP,
    "user_annotation": Kind.ANNOTATION,
    "gpu_user_annotation": Kind.GPU_ANNOTATION,
    "kernel": Kind.KERNEL,
    "gpu_memcpy": Kind.MEMCPY,
    "gpu_memset": Kind.MEMSET,
    "cuda_runtime": Kind.RUNTIME,
    "cuda_driver": Kind.RUNTIME,
    "cuda_sync": Kind.SYNC,
    "cuda_event": Kind.SYNC,
    "python_function": Kind.PYTHON,
    "overhead": Kind.OVERHEAD,
    "cpu_instant_event": Kind.INSTANT,
    "cuda_profiler_range": Kind.ACCELERATOR,
    "xpu_runtime": Kind.RUNTIME,
    "xpu_driver": Kind.RUNTIME,
    "xpu_sync": Kind.SYNC,
    "xpu_scope_profiler": Kind.ACCELERATOR,
    "mtia_runtime": Kind.RUNTIME,
    "mtia_ccp_events": Kind.ACCELERATOR,
    "mtia_insight": Kind.ACCELERATOR,
    "glow_runtime": Kind.ACCELERATOR,
    "hpu_op": Kind.ACCELERATOR,
    "collective_comm": Kind.ACCELERATOR,
    "privateuse1_runtime": Kind.RUNTIME,
    "privateuse1_driver": Kind.RUNTIME,
    # Kineto of 2020 and 2021.
    "Operator": Kind.CPU_OP,
    "Runtime": Kind.RUNTIME,
    "Kernel": Kind.KERNEL,
    "Memcpy": Kind.MEMCPY,
    "Memset": Kind.MEMSET,
    # Known, and not kept: the record window, counters, flows, bookkeeping of the profiler.
    "Trace": None,
    "external_correlation": None,
    "mtia_counters": None,
    "hardware_counters": None,
    "ac2g": None,
    "fwdbwd": None,
}
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


DTYPE_BYTES: dict[str, int] = {
    "bool": 1,
    "byte": 1,
    "char": 1,
    "unsigned char": 1,
    "signed char": 1,
    "uint8": 1,
    "int8": 1,
    "qint8": 1,
    "quint8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "short": 2,
    "short int": 2,
    "uint16": 2,
    "int16": 2,
    "half": 2,
    "float16": 2,
    "bfloat16": 2,
    "int": 4,
    "int32": 4,
    "uint32": 4,
    "unsigned int": 4,
    "qint32": 4,
    "float": 4,
    "float32": 4,
    "complexhalf": 4,
    "complex<half>": 4,
    "long": 8,
    "long int": 8,
    "long long": 8,
    "int64": 8,
    "uint64": 8,
    "unsigned long": 8,
    "double": 8,
    "float64": 8,
    "complexfloat": 8,
    "complex<float>": 8,
    "complexdouble": 16,
    "complex<double>": 16,
}
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
_FUSED_LOOKUP = re.compile(r"fbgemm::split_embedding_(\w+_)?codegen_lookup_(?!none_)\w+_function")
_OPTIMIZER_STEP = re.compile(r"Optimizer\.step#(\w+)\.step$")
_DATA_LOADER = re.compile(r"enumerate\((DataLoader|DataPipe)\)#(\w*)")
_OLD_BACKWARD = re.compile(
    r"\w*Backward\d*$|torch::autograd::(?:AccumulateGrad|CopyBackwards|CopySlices|GraphRoot)$"
)
_COMPILE = re.compile(
    r".*\(dynamo_timed\)$|_compile\.compile_inner|compile_fx|entire_frame_compile|backend_compile|dynamo$"
)
_GENERATED = re.compile(r"fused_[a-z_]|nvfuser_|(?:void )?(?:nvfuser::|CudaCodeGen::)|triton_[a-z]+_fused")
_COMPILED_REGION = re.compile(r"Torch-Compiled Region: (?:!\d+/)?(\d{1,9})/(\d{1,9})")
_GC = re.compile(r"Python GC|gc\.collect|Garbage [Cc]ollect|gc:")


def step_number(name: str) -> int | None:
    """Return the N of ``ProfilerStep#N``, ``None`` for any other name."""
    match = _STEP.match(name)
    return int(match.group(1)) if match else None


def optimizer_step_class(name: str) -> str | None:
    """Return the class in ``Optimizer.step#AdamW.step``, ``None`` for any other name."""
    match = _OPTIMIZER_STEP.match(name)
    return match.group(1) if match else None


def updates_in_backward_pass(name: str) -> bool:
    """True for FBGEMM's lookup of embeddings whose optimizer runs in the backward pass."""
    return _FUSED_LOOKUP.match(name) is not None


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


_CPU_OPERATOR = re.compile(r"\w+::.*(?:mkldnn|onednn|fbgemm|_for_cpu|_cpu$)|(?:mkldnn|onednn|quantized)::")


def is_cpu_operator(name: str) -> bool:
    """True for an operator that exists on CPUs alone: those of oneDNN and FBGEMM, and ``..._cpu``."""
    return _CPU_OPERATOR.match(name) is not None


def is_compile_range(name: str) -> bool:
    """True for compilation (Dynamo, Inductor), not for running compiled code."""
    return _COMPILE.match(name) is not None


def is_generated_kernel(name: str) -> bool:
    """True for a kernel that a fuser generated while the job ran: TorchScript's, nvFuser's, or Inductor's."""
    return _GENERATED.match(name) is not None


def compiled_region(name: str) -> tuple[int, int] | None:
    """Return the numbers of a region of compiled code, and of its recompilation, ``None`` for other names."""
    match = _COMPILED_REGION.match(name)
    return (int(match[1]), int(match[2])) if match else None


def is_gc_range(name: str) -> bool:
    """True for Python's garbage collection."""
    return _GC.match(name) is not None


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
