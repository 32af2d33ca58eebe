"""Counts the bytes of tensors that are alive while code runs on fake tensors, which have shapes and no memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CallBytes = Callable[[Any, Sequence[Any]], int]
"""Operator and arguments to the most bytes that a call holds besides its arguments, the result included."""


class LiveBytes(TorchDispatchMode):
    """The bytes of all storages made while the mode is active, and their peak.

    Args:
        call_bytes: for operators that hold more than their result; 0 for others.
        balanced: number of experts among which tokens are taken to be shared evenly: `nonzero` of n values has
            n / balanced results.
    """

    def __init__(self, call_bytes: CallBytes, balanced: int) -> None:
        super().__init__()
        self._call_bytes, self._balanced = call_bytes, balanced
        self._seen: dict[int, weakref.ref[Any]] = {}
        self.live = 0
        self.peak = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), options: Any = None
    ) -> Any:
        if function is torch.ops.aten.nonzero.default:
            (values,) = arguments
            count = max(1, values.numel() // self._balanced)
            out = values.new_empty((count, values.dim()), dtype=torch.int64)
        else:
            out = function(*arguments, **(options or {}))
        held = max(self._call_bytes(function, arguments), _casts(function, arguments))
        self.peak = max(self.peak, self.live + held)
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor)
        return out

    def exclude(self, tensors: Sequence[torch.Tensor]) -> None:
        """Do not count these tensors, which exist already."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._seen[id(storage)] = weakref.ref(storage)

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = id(storage), storage.nbytes()
        known = self._seen.get(key)
        if known is not None and known() is storage:
            return

        def freed(_: Any) -> None:
            self.live -= nbytes
            self._seen.pop(key, None)

        self._seen[key] = weakref.ref(storage, freed)
        self.live += nbytes
        self.peak = max(self.peak, self.live)


def _casts(function: Any, arguments: Sequence[Any]) -> int:
    """Bytes of a pointwise operator on operands of different dtypes: the CPU casts them to the common one first."""
    if torch.Tag.pointwise not in function.tags:
        return 0
    operands = [one for one in arguments if isinstance(one, torch.Tensor) and one.is_floating_point()]
    dtypes = {one.dtype for one in operands if one.dim()}
    if len(dtypes) < 2:
        return 0
    common = max(dtypes, key=lambda dtype: dtype.itemsize)
    cast = sum(one.numel() * common.itemsize for one in operands if one.dim() and one.dtype != common)
    shape = torch.broadcast_shapes(*(one.shape for one in operands))
    return cast + shape.numel() * common.itemsize
