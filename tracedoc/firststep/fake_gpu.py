"""Make a script believe that it has one GPU, and its wrappers that they have nothing to shard."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from importlib import import_module
from typing import Any


class ScriptSettings:
    """What the script asked for: dtypes of autocast and FSDP as "bf16", "fp16" or "", and a compiler."""

    def __init__(self) -> None:
        self.autocast = ""
        self.sharded = ""
        self.compiled = False


_HALVES = {"torch.bfloat16": "bf16", "torch.float16": "fp16"}


def fake_gpu(fake: Any) -> ScriptSettings:
    """Replace in torch what needs a device, other ranks or a compiler; ``fake`` is the mode of fake tensors.

    The torch that is patched belongs to the process of the estimate alone.
    """
    torch: Any = import_module("torch")
    settings = ScriptSettings()
    _devices(torch)
    _autocast(torch, settings)
    _compiler(torch, settings)
    _conversion(torch)
    _loader(torch, fake)
    if torch.distributed.is_available():
        _processes(torch)
        _wrappers(torch, settings)
    return settings


_DEVICES = ("cuda", "cpu")
"""What becomes the CPU, whatever its number: fake tensors of "cpu:0" do not mix with those of "cpu"."""


def on_host() -> Any:
    """Return a mode in which every device is the CPU, and values that nobody knows are zeros."""
    torch: Any = import_module("torch")
    fake_tensor: Any = import_module("torch._subclasses.fake_tensor").FakeTensor
    function_mode: Any = import_module("torch.overrides").TorchFunctionMode

    def is_device(value: object) -> bool:
        if isinstance(value, torch.device):
            return value.type in _DEVICES
        return isinstance(value, str) and value.split(":")[0] in _DEVICES

    class OnHost(function_mode):  # type: ignore[misc]
        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            kwargs = {k: "cpu" if is_device(v) else v for k, v in (kwargs or {}).items()}
            if func is torch.Tensor.cuda:
                return args[0]
            if func in (torch.Tensor.tolist, torch.Tensor.numpy) and isinstance(args[0], fake_tensor):
                zeros = torch.utils._python_dispatch._disable_current_modes
                with zeros():
                    return func(torch.zeros(args[0].shape, dtype=args[0].dtype))
            if func is torch.Tensor.to and len(args) > 1 and type(args[1]) is int:
                args = (args[0], "cpu", *args[2:])
            if isinstance(kwargs.get("device"), int):
                kwargs["device"] = "cpu"
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
            if func is torch.Tensor.pin_memory:
                return args[0]
            return func(*("cpu" if is_device(a) else a for a in args), **kwargs)

    return OnHost()


def _nothing(*given: Any, **named: Any) -> None:
    """Do nothing."""


def _always(value: Any) -> Callable[..., Any]:
    return lambda *given, **named: value


class _Stream:
    """Stands in for a CUDA stream or event: everything is done at once."""

    def __init__(self, *given: Any, **named: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _always(0.0 if name == "elapsed_time" else None)


_SILENT = """\
set_device synchronize empty_cache manual_seed manual_seed_all _lazy_init init ipc_collect
reset_peak_memory_stats reset_max_memory_allocated set_per_process_memory_fraction
"""
"""Functions of ``torch.cuda`` that have nothing to do."""


def _devices(torch: Any) -> None:
    cuda = torch.cuda
    for name in _SILENT.split():
        setattr(cuda, name, _nothing)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, _always(0))
    about = types.SimpleNamespace(
        name="GPU", major=9, minor=0, total_memory=1 << 40, multi_processor_count=100, warp_size=32
    )
    for name, value in (
        ("is_available", True),
        ("is_initialized", False),
        ("device_count", 1),
        ("current_device", 0),
        ("get_device_name", "GPU"),
        ("get_device_capability", (9, 0)),
        ("get_device_properties", about),
        ("is_bf16_supported", True),
        ("mem_get_info", (1 << 40, 1 << 40)),
        ("memory_stats", {}),
        ("current_stream", _Stream()),
        ("default_stream", _Stream()),
        ("stream", _Stream()),
        ("get_rng_state_all", []),
    ):
        setattr(cuda, name, _always(value))
    cuda.Stream = cuda.Event = cuda.device = _Stream
    torch.set_default_device = torch.save = _nothing


def _autocast(torch: Any, settings: ScriptSettings) -> None:
    begin = torch.autocast.__init__

    def __init__(  # noqa: N807
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, **named: Any
    ) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        if enabled:
            settings.autocast = _HALVES.get(str(dtype or torch.get_autocast_dtype(device_type)), "")
        begin(self, device_type, dtype, enabled, **named)

    torch.autocast.__init__ = __init__
    # Whether a gradient overflowed is not known: the step is taken.
    torch.amp.GradScaler._maybe_opt_step = lambda self, optimizer, state, *given, **named: optimizer.step(
        *given, **named
    )


def _compiler(torch: Any, settings: ScriptSettings) -> None:
    def compile_(model: Any = None, **named: Any) -> Any:
        settings.compiled = True
        return (lambda function: function) if model is None else model

    torch.compile = compile_
    torch.nn.Module.compile = lambda self, *given, **named: compile_(self)


def _conversion(torch: Any) -> None:
    """Let modules take converted parameters by assignment; a parameter that is tied stays tied."""

    def apply(self: Any, convert: Any, recurse: bool = True) -> Any:
        converted: dict[int, tuple[Any, Any]] = {}
        for module in self.modules() if recurse else (self,):
            for held in (module._parameters, module._buffers):
                for name, old in held.items():
                    if old is None:
                        continue
                    if id(old) not in converted:
                        with torch.no_grad():
                            new = convert(old)
                        if (new.device, new.dtype) == (old.device, old.dtype):
                            new = old  # an optimizer may hold it already
                        elif held is module._parameters:
                            new = torch.nn.Parameter(new, old.requires_grad)
                        converted[id(old)] = old, new
                    held[name] = converted[id(old)][1]
        return self

    torch.nn.Module._apply = apply


def _loader(torch: Any, fake: Any) -> None:
    """Read batches in this process, with real numbers: samplers and collators look at them."""
    unset_fake = import_module("torch._subclasses.fake_tensor").unset_fake_temporarily
    loader: Any = torch.utils.data.DataLoader
    iterator: Any = torch.utils.data.dataloader._BaseDataLoaderIter
    begin, iterate, following = loader.__init__, loader.__iter__, iterator.__next__

    def __init__(self: Any, *given: Any, **named: Any) -> None:  # noqa: N807
        here = {"num_workers": 0, "pin_memory": False, "persistent_workers": False, "prefetch_factor": None}
        begin(self, *given[:5], **{**named, **here, "timeout": 0, "multiprocessing_context": None})

    def __iter__(self: Any) -> Any:  # noqa: N807
        with unset_fake():
            return iterate(self)

    def __next__(self: Any) -> Any:  # noqa: N807
        with unset_fake():
            return following(self)

    loader.__init__, loader.__iter__, iterator.__next__ = __init__, __iter__, __next__


def _processes(torch: Any) -> None:
    fake_store = import_module("torch.testing._internal.distributed.fake_pg").FakeStore
    dist = torch.distributed
    begin = dist.init_process_group

    def init_process_group(*given: Any, **named: Any) -> None:
        if not dist.is_initialized():
            begin(backend="fake", store=fake_store(), rank=0, world_size=1)

    dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group


def _wrappers(torch: Any, settings: ScriptSettings) -> None:
    """Let wrappers pass their module through; with FSDP's mixed precision it computes in that dtype."""
    nn = torch.nn

    class Passing(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self, module: Any, *given: Any, mixed_precision: Any = None, **named: Any) -> None:
            super().__init__()
            self.module = _computing_in(torch, module, mixed_precision, settings)

        def forward(self, *given: Any, **named: Any) -> Any:
            return self.module(*given, **named)

        def no_sync(self) -> Any:
            return contextlib.nullcontext()

        def clip_grad_norm_(self, largest: float, norm_type: float = 2.0) -> Any:
            return nn.utils.clip_grad_norm_(self.parameters(), largest, norm_type)

        def register_comm_hook(self, *given: Any, **named: Any) -> None:
            pass

    def fully_shard(module: Any, *given: Any, mp_policy: Any = None, **named: Any) -> Any:
        for name in _SHARDED_METHODS:
            setattr(module, name, _nothing)
        return _computing_in(torch, module, mp_policy, settings)

    device_mesh: Any = import_module("torch.distributed.device_mesh")
    fsdp: Any = import_module("torch.distributed.fsdp")
    device_mesh.init_device_mesh = torch.distributed.init_device_mesh = _always(None)
    nn.parallel.DistributedDataParallel = nn.parallel.distributed.DistributedDataParallel = Passing
    fsdp.FullyShardedDataParallel = fsdp.fully_sharded_data_parallel.FullyShardedDataParallel = Passing
    fsdp.fully_shard = fully_shard


_SHARDED_METHODS = (
    "set_requires_gradient_sync",
    "set_is_last_backward",
    "set_reshard_after_backward",
    "set_modules_to_forward_prefetch",
    "set_modules_to_backward_prefetch",
    "unshard",
)
"""What ``fully_shard`` adds to a module, and scripts call."""


def _computing_in(torch: Any, module: Any, policy: Any, settings: ScriptSettings) -> Any:
    dtype = getattr(policy, "param_dtype", None)
    if dtype is None:
        return module
    if any(p.dtype != dtype for p in module.parameters()):
        settings.sharded = _HALVES.get(str(dtype), "")

    def cast(_: Any, given: Any) -> Any:
        floating = (isinstance(a, torch.Tensor) and a.is_floating_point() for a in given)
        return tuple(a.to(dtype) if f else a for a, f in zip(given, floating, strict=True))

    module.to(dtype)
    module.register_forward_pre_hook(cast)
    return module
