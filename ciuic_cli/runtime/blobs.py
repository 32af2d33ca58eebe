"""From a parameter's bytes to matrices on its device: parsed and checked once per tensor, then remembered.

This is also where a device gets its kernels: `WEIGHTS` and `STACKS` say by device type what stands for a
blob there.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import TypeVar, cast

import torch

from ciuic_cli.codecs import native
from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.stack import ExpertStack
from ciuic_cli.runtime.matrices import CpuMatrix, TorchMatrix
from ciuic_cli.runtime.weights import PlainStack, PlainWeight, Stack, Weight, expert_blobs

Value = TypeVar("Value", Weight, Stack)
Maker = TypeVar("Maker", bound=Callable[..., Weight | Stack])

CPU_SMALL_BATCH = {"avx512vnni": 48, "avx2": 24, "portable": 12}
"""By native kernels: the batch up to which multiplying from the codes beat panels (one thread, 4096x4096, 4 bits)."""


def portable_weight(packed: PackedMatrix, blob: torch.Tensor) -> Weight:
    """A weight on any device, by torch operations."""
    return PlainWeight(TorchMatrix.on_device(packed, blob))


def portable_stack(stack: ExpertStack, blob: torch.Tensor) -> Stack:
    """A stack on any device, by torch operations."""
    parts = zip(stack.experts, expert_blobs(stack, blob), strict=True)
    return PlainStack(tuple(TorchMatrix.on_device(packed, part) for packed, part in parts))


def _cpu_weight(packed: PackedMatrix, blob: torch.Tensor) -> Weight:
    return PlainWeight(CpuMatrix(packed), CPU_SMALL_BATCH[native.cpu_kernels()])


def _cpu_stack(stack: ExpertStack, blob: torch.Tensor) -> Stack:
    experts = tuple(CpuMatrix(packed) for packed in stack.experts)
    return PlainStack(experts, CPU_SMALL_BATCH[native.cpu_kernels()])


def _cuda_weight(packed: PackedMatrix, blob: torch.Tensor) -> Weight:
    from ciuic_cli.runtime import gpu  # its kernels' modules are for machines that have a GPU

    return gpu.weight(packed, blob) if gpu.usable(blob.device) else portable_weight(packed, blob)


def _cuda_stack(stack: ExpertStack, blob: torch.Tensor) -> Stack:
    from ciuic_cli.runtime import gpu

    return gpu.stack(stack, blob) if gpu.usable(blob.device) else portable_stack(stack, blob)


WEIGHTS: dict[str, Callable[[PackedMatrix, torch.Tensor], Weight]] = {
    "cpu": _cpu_weight,
    "cuda": _cuda_weight,
}
STACKS: dict[str, Callable[[ExpertStack, torch.Tensor], Stack]] = {
    "cpu": _cpu_stack,
    "cuda": _cuda_stack,
}
"""By device type: (what was parsed from the blob, the blob on its device). Others decode with torch
operations."""


@functools.lru_cache
def _notice(device: str) -> None:
    warnings.warn(
        f"ciuic has no kernels for {device} devices: torch operations decode the weights, which is slow",
        RuntimeWarning,
        stacklevel=2,
    )


class _Parsed:
    """What a blob held when it was parsed, and whether the tensor still is that blob."""

    def __init__(self, blob: torch.Tensor, value: Weight | Stack) -> None:
        self.value = value
        # A dictionary with tensors as weak keys would take as long to ask as a tenth of a small product.
        self.blob = weakref.ref(blob, functools.partial(_forget, id(blob)))
        self.address = blob.data_ptr()
        self.version = _version(blob)

    def fits(self, blob: torch.Tensor) -> bool:
        return self.blob() is blob and self.address == blob.data_ptr() and self.version == _version(blob)


def _version(blob: torch.Tensor) -> int:
    # Tensors made in inference mode do not count their changes; nothing writes to a blob in place anyway.
    return 0 if blob.is_inference() else blob._version


_parsed: dict[int, _Parsed] = {}
"""By id of the blob, as long as it lives."""


def _forget(key: int, blob: weakref.ref[torch.Tensor]) -> None:
    known = _parsed.get(key)
    if known is not None and known.blob is blob:
        del _parsed[key]


def drop_stale(blob: torch.Tensor) -> None:
    """Let go of what was parsed from a blob that has other memory since: it would keep the old one."""
    known = _parsed.get(id(blob))
    if known is not None and not known.fits(blob):
        del _parsed[id(blob)]


def weight_of(blob: torch.Tensor) -> Weight:
    """The matrix in a blob (uint8 [nbytes]), for the blob's device.

    Raises InputError if the blob is damaged.
    """
    return _parsed_once(
        blob,
        lambda: _for_device(WEIGHTS, portable_weight, blob)(
            PackedMatrix.from_buffer(blob, where="weight"), blob.detach()
        ),
    )


def stack_of(blob: torch.Tensor) -> Stack:
    """The experts in a stack's blob; as `weight_of`."""
    return _parsed_once(
        blob,
        lambda: _for_device(STACKS, portable_stack, blob)(
            ExpertStack.from_buffer(blob, where="experts"), blob.detach()
        ),
    )


def _parsed_once(blob: torch.Tensor, parse: Callable[[], Value]) -> Value:
    known = _parsed.get(id(blob))
    if known is None or not known.fits(blob):
        known = _Parsed(blob, parse())
        _parsed[id(blob)] = known
    return cast(Value, known.value)


def _for_device(makers: dict[str, Maker], portable: Maker, blob: torch.Tensor) -> Maker:
    device = blob.device.type
    if device not in makers:
        _notice(device)
    return makers.get(device, portable)
