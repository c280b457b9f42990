"""Count what a first step under fake tensors allocates, by kind, and its arithmetic."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from importlib import import_module
from typing import Any


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
