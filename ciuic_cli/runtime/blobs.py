"""From a blob parameter to the matrix or stack that computes with it: parsed and checked once per tensor, then cached.

WEIGHTS and STACKS choose the implementation by device type.
"""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import TypeVar, cast

import torch

from ciuic_cli.codecs import native
from ciuic_cli.codecs.layout import read_header
from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.stack import ExpertStack, read_stack_header
from ciuic_cli.runtime.matrices import CpuMatrix, TorchMatrix
from ciuic_cli.runtime.weights import PlainStack, PlainWeight, SmallBatch, Stack, Weight

Value = TypeVar("Value", Weight, Stack)

CPU_SMALL_BATCH = {
    "amx": SmallBatch(bfloat16=512, float16=48, float32=40),
    "avx512vnni": SmallBatch(bfloat16=sys.maxsize, float16=48, float32=48),
    "avx2": SmallBatch(bfloat16=sys.maxsize, float16=24, float32=14),
    "portable": SmallBatch(bfloat16=12, float16=12, float32=8),
}
"""By native kernels: the most rows of x for which multiplying from the codes beat decoded panels, with one thread and 4
bits per weight (docs/experiments/runtime/matrix-units.md, many-rows.md and exact-products.md)."""

_WEIGHT, _STACK = "weight", "experts"
"""Names in messages about damaged blobs."""


def torch_weight(blob: torch.Tensor) -> Weight:
    """A weight on any device, computed with torch operations."""
    return PlainWeight(TorchMatrix.on_device(read_header(blob, where=_WEIGHT), blob))


def torch_stack(blob: torch.Tensor) -> Stack:
    """A stack on any device, computed with torch operations."""
    header = read_stack_header(blob, where=_STACK)
    parts = zip(header.experts, header.experts_in(blob), strict=True)
    return PlainStack(tuple(TorchMatrix.on_device(expert, part) for expert, part in parts))


def _cpu_weight(blob: torch.Tensor) -> Weight:
    matrix = CpuMatrix(PackedMatrix.from_buffer(blob, where=_WEIGHT))
    return PlainWeight(matrix, small_batch())


def _cpu_stack(blob: torch.Tensor) -> Stack:
    stack = ExpertStack.from_buffer(blob, where=_STACK)
    experts = tuple(CpuMatrix(packed) for packed in stack.experts)
    return PlainStack(experts, small_batch())


def small_batch() -> SmallBatch:
    """The most rows of x that the CPU's kernels multiply straight from the codes."""
    return CPU_SMALL_BATCH[native.cpu_kernels()]


def _cuda_weight(blob: torch.Tensor) -> Weight:
    from ciuic_cli.runtime import gpu  # loaded only on machines with a GPU

    return (
        gpu.weight(read_header(blob, where=_WEIGHT), blob) if gpu.usable(blob.device) else torch_weight(blob)
    )


def _cuda_stack(blob: torch.Tensor) -> Stack:
    from ciuic_cli.runtime import gpu

    return (
        gpu.stack(read_stack_header(blob, where=_STACK), blob)
        if gpu.usable(blob.device)
        else torch_stack(blob)
    )


WEIGHTS: dict[str, Callable[[torch.Tensor], Weight]] = {"cpu": _cpu_weight, "cuda": _cuda_weight}
"""By device type: the weight in a blob on that device. Other devices use `torch_weight`."""

STACKS: dict[str, Callable[[torch.Tensor], Stack]] = {"cpu": _cpu_stack, "cuda": _cuda_stack}
"""By device type: the stack in a blob on that device. Other devices use `torch_stack`."""


@functools.lru_cache
def _warn_no_kernels(device: str) -> None:
    warnings.warn(
        f"ciuic has no kernels for {device} devices: torch operations decode the weights, which is slow",
        RuntimeWarning,
        stacklevel=2,
    )


class _Parsed:
    """The weight or stack of a blob, and what identifies the blob's memory at the time it was parsed."""

    def __init__(self, blob: torch.Tensor, value: Weight | Stack) -> None:
        self.value = value
        # A WeakKeyDictionary of tensors would cost a tenth of a small product per lookup.
        self.blob = weakref.ref(blob, functools.partial(_forget, id(blob)))
        self.address = blob.data_ptr()
        self.version = _version(blob)

    def fits(self, blob: torch.Tensor) -> bool:
        """Whether the tensor still has the memory that was parsed."""
        return self.blob() is blob and self.address == blob.data_ptr() and self.version == _version(blob)


def _version(blob: torch.Tensor) -> int:
    # Tensors made in inference mode have no version counter; nothing writes to a blob in place anyway.
    return 0 if blob.is_inference() else blob._version


_parsed: dict[int, _Parsed] = {}
"""By the blob's id; an entry is removed when its tensor is freed."""


def _forget(key: int, blob: weakref.ref[torch.Tensor]) -> None:
    parsed = _parsed.get(key)
    if parsed is not None and parsed.blob is blob:
        del _parsed[key]


def drop_stale(blob: torch.Tensor) -> None:
    """Removes a blob's cache entry if the tensor has other memory since; the entry would keep the old memory alive."""
    parsed = _parsed.get(id(blob))
    if parsed is not None and not parsed.fits(blob):
        del _parsed[id(blob)]


def weight_of(blob: torch.Tensor) -> Weight:
    """The weight in a blob, uint8 [nbytes], on the blob's device.

    Raises:
        InputError: the blob is damaged.
    """
    return _parsed_once(blob, WEIGHTS, torch_weight)


def stack_of(blob: torch.Tensor) -> Stack:
    """The experts in a stack's blob; as `weight_of`."""
    return _parsed_once(blob, STACKS, torch_stack)


def _parsed_once(
    blob: torch.Tensor,
    makers: dict[str, Callable[[torch.Tensor], Value]],
    portable: Callable[[torch.Tensor], Value],
) -> Value:
    parsed = _parsed.get(id(blob))
    if parsed is None or not parsed.fits(blob):
        device = blob.device.type
        if device not in makers:
            _warn_no_kernels(device)
        parsed = _Parsed(blob, makers.get(device, portable)(blob.detach()))
        _parsed[id(blob)] = parsed
    return cast(Value, parsed.value)
