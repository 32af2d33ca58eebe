"""Counts the bytes of tensors that are alive while code runs on fake tensors, which have shapes and no memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CallBytes = Callable[[Any, Sequence[Any]], int]
"""Operator and arguments to the most bytes that a call holds besides its arguments, the result included."""


@dataclass(frozen=True)
class Peak:
    """The most bytes that were alive at a time, and those of complete gradients among them."""

    nbytes: int = 0
    gradients: int = 0


class LiveBytes(TorchDispatchMode):
    """The bytes of all storages made while the mode is active, and their peaks, in parts of the run.

    Storages that change their size, as FSDP2's do, count with the size that they have.

    Args:
        call_bytes: for operators that hold more than their result; 0 for others.
        balanced: number of experts among which tokens are taken to be shared evenly: `nonzero` of n values has
            n / balanced results.

    Attributes:
        live: bytes now. gradients: bytes of complete gradients now, which the caller counts.
        peaks: the peak of each part of the run, by the number that `begin` got; that of the first part is number -1.
    """

    def __init__(self, call_bytes: CallBytes, balanced: int) -> None:
        super().__init__()
        self._call_bytes, self._balanced = call_bytes, balanced
        self._seen: dict[int, weakref.ref[Any]] = {}
        self._sizes: dict[int, int] = {}
        self._part = -1
        self.live = self.gradients = 0
        self.peaks: dict[int, Peak] = {-1: Peak()}

    @property
    def peak(self) -> int:
        """The most bytes of all parts."""
        return max(peak.nbytes for peak in self.peaks.values())

    def begin(self, part: int) -> None:
        """A part of the run begins, or goes on."""
        self._part = part
        self._reach(self.live)

    def forget_peaks(self) -> None:
        """Count peaks from now on."""
        self.peaks = {}
        self.begin(-1)

    def __enter__(self) -> LiveBytes:
        original = self._resize = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            self._resized(storage)
            return result

        vars_of_class: Any = torch.UntypedStorage
        vars_of_class.resize_ = resize
        entered: LiveBytes = super().__enter__()
        return entered

    def __exit__(self, *details: Any) -> None:
        vars_of_class: Any = torch.UntypedStorage
        vars_of_class.resize_ = self._resize
        super().__exit__(*details)

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), options: Any = None
    ) -> Any:
        if function is torch.ops.aten.nonzero.default:
            (values,) = arguments
            count = max(1, values.numel() // self._balanced)
            out = values.new_empty((count, values.dim()), dtype=torch.int64)
        elif function is torch.ops.aten._grouped_mm.default:
            left, right, *others = arguments
            out = _grouped_product(left, right, others[0] if others else (options or {}).get("offs"))
        else:
            out = function(*arguments, **(options or {}))
        held = max(self._call_bytes(function, arguments), _casts(function, arguments))
        self._reach(self.live + held)
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and not isinstance(
                tensor, DTensor
            ):  # which holds another tensor
                self._note(tensor)
        return out

    def exclude(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do not count these tensors, which exist already."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._seen[id(storage)] = weakref.ref(storage)

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        known = self._seen.get(key)
        if known is not None and known() is storage:
            return

        def freed(_: Any) -> None:
            self.live -= self._sizes.pop(key, 0)
            self._seen.pop(key, None)

        self._seen[key] = weakref.ref(storage, freed)
        self._sizes[key] = storage.nbytes()
        self.live += storage.nbytes()
        self._reach(self.live)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._sizes:
            self.live += storage.nbytes() - self._sizes[key]
            self._sizes[key] = storage.nbytes()
            self._reach(self.live)

    def _reach(self, nbytes: int) -> None:
        known = self.peaks.get(self._part)
        if known is None or nbytes > known.nbytes:
            self.peaks[self._part] = Peak(nbytes, self.gradients)


def _grouped_product(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor | None) -> torch.Tensor:
    """The result of `_grouped_mm`, whose shape torch derives for bfloat16 only. ends: one number per group."""
    if left.dim() == right.dim() == 2 and ends is not None:
        return left.new_empty((ends.numel(), left.shape[0], right.shape[1]))
    return left.new_empty((*left.shape[:-1], right.shape[-1]))


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
