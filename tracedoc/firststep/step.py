"""Follow the modules of a script to its first update, and write down what that step was."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any

from tracedoc.firststep.fake_gpu import ScriptSettings


class Allocations:
    """What is allocated, and at which peak, from the first forward pass with gradients on.

    ``live`` counts bytes by kind: "parameter", "gradient", "copy" (a parameter in autocast's dtype), and
    "other", which is activations and what works on them. While ``measuring``, ``peak`` is the
    most of "other", ``whole`` the most of everything together.
    """

    def __init__(self) -> None:
        self.live: Counter[str] = Counter()
        self.peak = self.whole = 0
        self.measuring = False
        self._kinds: dict[int, tuple[str, int]] = {}

    def see(self, storage: Any, kind: str = "other") -> None:
        """Count a storage once, from now on until nothing holds it."""
        key = storage._cdata
        if key in self._kinds:
            return
        size = storage.nbytes()
        self._kinds[key] = (kind, size)
        self.live[kind] += size
        weakref.finalize(storage, self._gone, key)
        if self.measuring:
            self.peak = max(self.peak, self.live["other"])
            self.whole = max(self.whole, sum(self.live.values()))

    def begin(self, given: Iterable[Any]) -> None:
        """Begin to measure. What is there, but for what the model is given, is data in host memory."""
        self.measuring = True
        kept = {storage._cdata for storage in given}
        for key, (kind, size) in list(self._kinds.items()):
            if key in self._kinds and kind == "other" and key not in kept:
                self._kinds[key] = ("host", size)
                self.live["other"] -= size

    def call(self, storage: Any, kind: str) -> None:
        """Give a storage another kind."""
        self.see(storage)
        before, size = self._kinds[storage._cdata]
        if before != "host":
            self.live[before] -= size
        self.live[kind] += size
        self._kinds[storage._cdata] = (kind, size)

    def _gone(self, key: int) -> None:
        kind, size = self._kinds.pop(key)
        if kind != "host":
            self.live[kind] -= size


def counting(allocations: Allocations, parameters: set[int]) -> Any:
    """A mode that counts what operators return as allocated, and answers what depends on values.

    ``parameters`` are the storages of parameters: what copies one to another dtype is autocast's.
    """
    torch: Any = import_module("torch")
    fake_tensor: Any = import_module("torch._subclasses.fake_tensor").FakeTensor
    dispatch_mode: Any = import_module("torch.utils._python_dispatch").TorchDispatchMode
    tree_leaves = import_module("torch.utils._pytree").tree_leaves
    aten = torch.ops.aten

    class Counting(dispatch_mode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            if func is aten._local_scalar_dense.default and isinstance(args[0], fake_tensor):
                return bool(1) if args[0].dtype is torch.bool else (1.0 if args[0].is_floating_point() else 1)
            result = func(*args, **(kwargs or {}))
            kind = "other"
            if func is aten._to_copy.default and args[0].untyped_storage()._cdata in parameters:
                kind = "copy"
            for tensor in tree_leaves(result):
                if isinstance(tensor, fake_tensor):
                    allocations.see(tensor.untyped_storage(), kind)
            return result

    return Counting()


def arithmetic() -> Any:
    """Return torch's counter of FLOPs, which knows the CPU's attention as well."""
    counter: Any = import_module("torch.utils.flop_counter")

    def forward(query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> int:
        return int(counter.sdpa_flop_count(query, key, value))

    def backward(grad: Any, query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> int:
        return int(counter.sdpa_backward_flop_count(grad, query, key, value))

    attention: Any = import_module("torch").ops.aten
    return counter.FlopCounterMode(
        display=False,
        custom_mapping={
            attention._scaled_dot_product_flash_attention_for_cpu: forward,
            attention._scaled_dot_product_flash_attention_for_cpu_backward: backward,
        },
    )


class Follower:
    """Hooks on every module and optimizer of the process; ``done`` gets the answer after the first update."""

    def __init__(
        self,
        allocations: Allocations,
        settings: ScriptSettings,
        flops: Any,
        done: Callable[[dict[str, Any]], None],
    ) -> None:
        self.parameters: set[int] = set()
        self._allocations, self._settings = allocations, settings
        self._flops, self._done = flops, done
        self._known: dict[int, Any] = {}
        self._blocks: list[Any] = []
        self._about: dict[str, Any] = {}
        self._entered: dict[int, int] = {}
        self._batch: list[Any] = []
        self._inputs = self._outputs = self._growth = self._backwards = 0

    def follow(self) -> None:
        """Install the hooks. They hold until the process ends."""
        torch: Any = import_module("torch")
        torch.nn.modules.module.register_module_forward_pre_hook(self._enter)
        torch.nn.modules.module.register_module_forward_hook(self._leave)
        optimizer: Any = import_module("torch.optim.optimizer")
        optimizer.register_optimizer_step_pre_hook(self._updating)
        optimizer.register_optimizer_step_post_hook(self._stepped)
        backward = torch.autograd.backward

        def counted(*given: Any, **named: Any) -> None:
            self._backwards += 1
            backward(*given, **named)

        torch.autograd.backward = counted
        call = torch.nn.Module.__call__

        def __call__(module: Any, *given: Any, **named: Any) -> Any:  # noqa: N807
            if "batch" not in self._about and torch.is_grad_enabled():
                self._note_batch(module, given, named)
            return call(module, *given, **named)

        torch.nn.Module.__call__ = __call__

    def _enter(self, module: Any, given: tuple[Any, ...]) -> None:
        if not (self._allocations.measuring or import_module("torch").is_grad_enabled()):
            return
        if id(module) not in self._known:
            self._meet(module)
        if not self._backwards and any(module is block for block in self._blocks):
            self._inputs += _bytes(given)
            self._entered[id(module)] = self._allocations.live["other"]

    def _leave(self, module: Any, given: tuple[Any, ...], result: Any) -> None:
        before = self._entered.pop(id(module), None)
        if before is not None:
            self._growth += self._allocations.live["other"] - before
            self._outputs += _bytes(result)

    def _meet(self, module: Any) -> None:
        """Look at a module, and all inside it, when it is first called for training."""
        root = "model" not in self._about and any(True for _ in module.parameters())
        for one in module.modules():
            self._known[id(one)] = one
            for parameter in one.parameters(recurse=False):
                self._allocations.call(parameter.untyped_storage(), "parameter")
                self.parameters.add(parameter.untyped_storage()._cdata)
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._accumulated)
            for buffer in one.buffers(recurse=False):
                self._allocations.call(buffer.untyped_storage(), "parameter")
        if root:
            path, self._blocks = find_blocks(module)
            self._about.update(model=_class(module), path=path)
            self._flops.flop_counts.clear()
            self._allocations.begin(t.untyped_storage() for t in self._batch)
            self._batch = []

    def _note_batch(self, module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Take note of the shape of the first tensor that a model is given."""
        self._batch = list(_tensors((*given, *named.values())))
        first = next(iter(self._batch), None)
        if first is not None and first.dim() and any(True for _ in module.parameters()):
            self._about.update(batch=list(first.shape), whole_numbers=not first.is_floating_point())

    def _accumulated(self, parameter: Any) -> None:
        self._allocations.call(parameter.grad.untyped_storage(), "gradient")

    def _updating(self, *given: Any) -> None:
        self._allocations.measuring = False  # what the update takes is counted as states

    def _stepped(self, optimizer: Any, given: Any, named: Any) -> None:
        if not self._backwards:
            return  # a step that updates nothing is no training step
        every = {id(p): p for module in self._known.values() for p in module.parameters(recurse=False)}
        trained = [p for p in every.values() if p.requires_grad]
        held = [p for group in optimizer.param_groups for p in group["params"]]
        states = sum(
            t.numel() for state in optimizer.state.values() for t in _tensors(state.values()) if t.numel() > 1
        )
        counts = self._flops.get_flop_counts().get("Global", {})
        attention = sum(n for operator, n in counts.items() if "attention" in str(operator))
        total = sum(counts.values())
        block = max(self._blocks, key=_parameters, default=None)
        self._done(
            {
                **self._about,
                "parameters": sum(p.numel() for p in every.values()),
                "trained": sum(p.numel() for p in trained),
                "dtype": str(trained[0].dtype).rpartition(".")[2] if trained else "float32",
                "autocast": self._settings.autocast,
                "sharded": self._settings.sharded,
                "compiled": self._settings.compiled,
                "optimizer": type(optimizer).__name__,
                "states": states / max(1, sum(p.numel() for p in held)),
                "rounds": self._backwards,
                "blocks": len(self._blocks),
                "block": _class(block) if block is not None else "",
                "block_parameters": _parameters(block) if block is not None else 0,
                "block_bytes": self._growth,
                "input_bytes": self._inputs,
                "output_bytes": self._outputs,
                "activation_bytes": self._allocations.peak,
                "peak_bytes": self._allocations.whole,
                "matmul_flops": (total - attention) // self._backwards,
                "attention_flops": attention // self._backwards,
            }
        )


def find_blocks(model: Any) -> tuple[str, list[Any]]:
    """Return the repeated blocks of a model and the path of their list: the class that holds most of it.

    Blocks are children of one module, of one class and size; of those inside each other the outer ones count.
    """
    best: tuple[int, str, list[Any]] = (0, "", [])
    for path, module in model.named_modules():
        kinds: dict[tuple[type, int], list[Any]] = {}
        for child in module.children():
            kinds.setdefault((type(child), _parameters(child)), []).append(child)
        for (_, each), alike in kinds.items():
            if len(alike) > 1 and each * len(alike) > best[0]:
                best = (each * len(alike), path, alike)
    return best[1], best[2]


def _parameters(module: Any) -> int:
    return sum(p.numel() for p in module.parameters())


def _class(module: Any) -> str:
    inner = getattr(module, "module", None)  # what DDP or FSDP wraps
    return type(inner if inner is not None else module).__name__


def _tensors(values: Any) -> Iterator[Any]:
    torch: Any = import_module("torch")
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors(value.values())
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _bytes(given: Any) -> int:
    floating = (t for t in _tensors([given]) if t.is_floating_point())
    return sum(t.numel() * t.element_size() for t in floating)
