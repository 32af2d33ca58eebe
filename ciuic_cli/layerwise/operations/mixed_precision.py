"""Matrix products of a layer: in bfloat16 beside a residual stream in float32, or in float32 through oneDNN."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ciuic_cli.layerwise.operations.sequence_attention import NativeAttention
from ciuic_cli.layerwise.operations.stable_bits import stable_bits
from ciuic_cli.process.processor import multiplies_bfloat16

_WRITES = {
    torch.Tensor.__setitem__: 2,
    torch.Tensor.index_add_: 3,
    torch.Tensor.index_copy_: 3,
    torch.Tensor.index_put_: 2,
    torch.Tensor.masked_scatter_: 2,
    torch.Tensor.scatter_: 3,
    torch.Tensor.scatter_add_: 3,
}
"""Methods of a tensor that write another one into it, and the position of that one, with the tensor itself at 0."""
_NAMES = ("value", "values", "source", "src")
"""Keywords of that argument."""


def compute_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the device multiplies it faster than float32 (twice as fast on recent CPUs), else float32."""
    if device.type == "cuda":
        return torch.bfloat16
    return torch.bfloat16 if multiplies_bfloat16() else torch.float32


@contextmanager
def float32_outputs(module: nn.Module) -> Iterator[None]:
    """Context in which the module returns float32. Some models compute in the dtype of the embedding's output."""
    handle = module.register_forward_hook(lambda module, args, output: output.float())
    try:
        yield
    finally:
        handle.remove()


class _WritesInOwnDtype(TorchFunctionMode):
    """While active, what is written into a tensor gets its dtype, as an assignment between whole tensors does.

    Some models (X-MOD, DBRX) collect products in a tensor that has the dtype of the layer's input. Without autocast
    both have the model's dtype; with it, torch refuses to write bfloat16 into float32.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        position = _WRITES.get(func)
        if position is not None and isinstance(args[0], torch.Tensor):
            dtype = args[0].dtype
            args = (
                *args[:position],
                *(_cast(value, dtype) for value in args[position : position + 1]),
                *args[position + 1 :],
            )
            kwargs = {
                key: _cast(value, dtype) if key in _NAMES else value for key, value in (kwargs or {}).items()
            }
        return func(*args, **(kwargs or {}))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    is_other = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != dtype
    return value.to(dtype) if is_other and dtype.is_floating_point else value


@contextmanager
def mixed_precision(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """In the block, matrix products of float32 tensors are computed in `dtype`, float32 or bfloat16. On a CPU the bits
    do not depend on the number of threads (`stable_bits`), and attention is native (`sequence_attention.py`)."""
    with stable_bits(device), NativeAttention():
        if dtype != torch.bfloat16:
            yield
        else:
            with torch.autocast(device.type, torch.bfloat16), _WritesInOwnDtype():
                yield
