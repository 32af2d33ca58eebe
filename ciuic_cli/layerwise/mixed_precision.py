"""Matrix products of a layer: in bfloat16 beside a residual stream in float32, or in float32 through oneDNN."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ciuic_cli.process.processor import multiplies_bfloat16

aten = torch.ops.aten
_EVEN, _MANY = 16, 128
"""MKL's products keep their bits if rows, columns and inputs are multiples of the first number, and not in batches also
at least the second: all of 660 did with up to 64 threads, many others did not (measured:
docs/experiments/statistics/thread-bits.md)."""
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


class _StableBits(TorchDispatchMode):
    """While active, operations on a CPU have the same bits for any number of threads.

    Of torch's own, these have not (measured: docs/experiments/statistics/thread-bits.md):

    - Float32 products of MKL, on processors without AVX-512, if sizes are small or odd. Those of oneDNN have. oneDNN
      also multiplies with weights as they lie in memory, because with AVX-512 it is the faster library (measured:
      docs/experiments/statistics/faster-moments.md).
    - The gradient of softmax.
    """

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        stable = None
        if func is aten._softmax_backward_data.default:
            stable = _softmax_gradient(*args)
        elif func is aten.mm.default and _is_in_float32(*args):
            stable = _product(*args)
        elif func is aten.addmm.default and not kwargs and _is_in_float32(*args[1:]):
            bias, left, right = args
            stable = _product(left, right, bias)
        elif func is aten.addmm_.default and not kwargs and _is_in_float32(*args[1:]):
            stable = _added_product(*args)
        elif func is aten.bmm.default and _is_in_float32(*args):
            stable = _products(*args)
        return func(*args, **(kwargs or {})) if stable is None else stable


def _softmax_gradient(
    gradient: torch.Tensor, output: torch.Tensor, dim: int, dtype: torch.dtype
) -> torch.Tensor | None:
    if output.device.type != "cpu":
        return None
    if output.dtype.itemsize < torch.float32.itemsize:
        gradient, output = gradient.float(), output.float()
    product = gradient * output
    return product.sub_(output * product.sum(dim, keepdim=True)).to(dtype)


def _is_in_float32(left: torch.Tensor, right: torch.Tensor) -> bool:
    return all(
        each.dtype == torch.float32 and each.device.type == "cpu" and each.numel() for each in (left, right)
    )


def _are_even(*sizes: int) -> bool:
    return all(size % _EVEN == 0 for size in sizes)


def _product(
    left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor | None:
    """left right + bias, for left (m, k), right (k, n) and a bias that broadcasts to (m, n); None: MKL's is stable."""
    sizes = (*left.shape, *right.shape)
    if not right.mT.is_contiguous() and _are_even(*sizes) and min(sizes) >= _MANY:
        return None
    in_product = bias if bias is not None and bias.dim() == 1 else None
    product = _by_onednn(left, right, in_product)
    return product if bias is None or bias is in_product else product.add_(bias)


def _added_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor | None:
    """Add left right to a total (m, n); None: MKL's sum is stable, which it is for any number of inputs."""
    if _are_even(*total.shape) and min(total.shape) >= _MANY:
        return None
    return total.add_(_by_onednn(left, right))


def _products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor | None:
    """left right for left (b, m, k), right (b, k, n); None: MKL's are stable."""
    if _are_even(*left.shape[1:], *right.shape[1:]):
        return None
    return torch.stack([_by_onednn(*pair) for pair in zip(left, right, strict=True)])


def _by_onednn(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """left right + bias, for left (m, k), right (k, n), bias (n,). With weights that are not contiguous, oneDNN's bits
    depend on threads, too."""
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
        left.contiguous(), right.mT.contiguous(), bias, "none", [], ""
    )
    return product


def _cast(value: Any, dtype: torch.dtype) -> Any:
    is_other = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != dtype
    return value.to(dtype) if is_other and dtype.is_floating_point else value


@contextmanager
def stable_bits(device: torch.device) -> Iterator[None]:
    """Context, also as a decorator, in which operations on a CPU have the same bits for any number of threads, forward
    and backward. On other devices it does nothing. `mixed_precision` contains it."""
    needed = device.type == "cpu" and torch.backends.mkldnn.is_available()
    with _StableBits() if needed else nullcontext():
        yield


@contextmanager
def mixed_precision(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """In the block, matrix products of float32 tensors are computed in `dtype`, float32 or bfloat16."""
    with stable_bits(device):
        if dtype != torch.bfloat16:
            yield
        else:
            with torch.autocast(device.type, torch.bfloat16), _WritesInOwnDtype():
                yield
