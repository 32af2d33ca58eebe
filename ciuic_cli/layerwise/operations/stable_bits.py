"""Operations on a CPU whose bits do not depend on the number of threads, in place of those of torch whose bits do.

Three kinds of operations in layers depend on it (measured: docs/experiments/statistics/thread-bits.md):

- Float32 products of MKL, on processors without AVX-512, if a size is small or odd. The products of oneDNN, torch's
  other library, do not depend on it if both factors are contiguous.
- Products in bfloat16 on processors with a matrix unit (AMX): oneDNN divides them by the number of threads. They run
  with the same number of threads everywhere, or with one where chunks of the text run side by side.
- The gradient of softmax.

Operations outside of layers that depend on it run with `process.threads.one_thread`.

Before such a product a matrix gets rows of zeros, so that oneDNN meets few shapes (`few_shapes.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ciuic_cli.layerwise.operations.few_shapes import with_rows_added
from ciuic_cli.process.processor import has_instructions
from ciuic_cli.process.threads import runs_beside_others, threads

aten = torch.ops.aten
_BFLOAT16_THREADS = 8
"""Threads of a product in bfloat16 whose bits depend on their number. Large products take two cores 2 to 32 %
longer with 8 threads than with 2, and up to 2.3 times as long with 16 (measured:
docs/experiments/statistics/thread-bits.md)."""
_EVEN = 16
"""MKL multiplies sizes that are multiples of this. Of 150 batched products with such sizes, none depended on the number
of threads, up to 64 (measured: docs/experiments/statistics/thread-bits.md)."""
_MANY = 128
"""MKL multiplies two matrices if their sizes are also at least this. None of 660 products depended on the number of
threads (measured: the same page)."""


def outer_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left rightᵀ (m, n) of float32 matrices left (m, k) and right (n, k), best contiguous.

    On a CPU oneDNN computes it. Of the two libraries in torch it is the faster one on AMD processors with AVX-512, with
    the same precision (measured: docs/experiments/statistics/faster-moments.md).
    """
    if left.device.type == "cpu" and torch.backends.mkldnn.is_available():
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            left.contiguous(), right.contiguous(), None, "none", [], ""
        )
        return product
    return left @ right.T


@contextmanager
def stable_bits(device: torch.device) -> Iterator[None]:
    """Context, also as a decorator, in which layers on a CPU have the same bits for any number of threads, forward and
    backward. On other devices it does nothing."""
    needed = device.type == "cpu" and torch.backends.mkldnn.is_available()
    with _StableBits() if needed else nullcontext():
        yield


class _StableBits(TorchDispatchMode):
    """While active, replaces the operations that the top of this file names.

    Products with a weight as it lies in memory (x Wᵀ) also go through oneDNN if their sizes are even, where that is the
    faster library (`_favours_onednn`).
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
        elif func is aten.mm.default and _are_float32(*args):
            stable = _product(*args)
        elif func is aten.addmm.default and not kwargs and _are_float32(*args[1:]):
            product = _product(*args[1:])
            stable = None if product is None else product.add_(args[0])
        elif func in _PRODUCTS and not kwargs and _are_of(torch.bfloat16, *args[-2:]):
            stable = _bfloat16_product(func, *args)
        elif func is aten.addmm_.default and not kwargs and _are_float32(*args[1:]):
            stable = _added_product(*args)
        elif func is aten.bmm.default and _are_float32(*args):
            stable = _batched_product(*args)
        return func(*args, **(kwargs or {})) if stable is None else stable


def _softmax_gradient(
    gradient: torch.Tensor, output: torch.Tensor, dim: int, dtype: torch.dtype
) -> torch.Tensor | None:
    """The arguments are those of torch's operation; None: on another device."""
    if output.device.type != "cpu":
        return None
    if output.dtype.itemsize < torch.float32.itemsize:
        gradient, output = gradient.float(), output.float()
    product = gradient * output
    return product.sub_(output * product.sum(dim, keepdim=True)).to(dtype)


def _are_float32(*factors: torch.Tensor) -> bool:
    return _are_of(torch.float32, *factors)


def _are_of(dtype: torch.dtype, *factors: torch.Tensor) -> bool:
    """True if all have this dtype, are on a CPU, and not empty."""
    return all(each.dtype == dtype and each.device.type == "cpu" and each.numel() for each in factors)


def _are_even(*sizes: int) -> bool:
    return all(size % _EVEN == 0 for size in sizes)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor | None:
    """left right for left (m, k), right (k, n); None: torch's own is stable."""
    sizes = (*left.shape, *right.shape)
    favours_torch = not (right.mT.is_contiguous() and _favours_onednn())
    if favours_torch and _are_even(*sizes) and min(sizes) >= _MANY:
        return None
    return outer_product(with_rows_added(left), right.mT)[: len(left)]


_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
"""Products whose last two arguments are the factors."""


def _bfloat16_product(func: Callable[..., torch.Tensor], *args: torch.Tensor) -> torch.Tensor:
    """The result of `func`, one of _PRODUCTS, with the same bits for any number of threads.

    args: the bias, if it has one, and the factors.
    """
    *bias, left, right = args
    rows = len(left)
    if left.dim() == 2 and (not bias or bias[0].dim() == 1):
        left = with_rows_added(left)
    fixed = _bfloat16_depends_on_threads() and not runs_beside_others()
    with threads(_BFLOAT16_THREADS) if fixed else nullcontext():
        return func(*bias, left, right)[:rows]


def _bfloat16_depends_on_threads() -> bool:
    """False on processors with AVX512_BF16 and without AMX, where no product depended on it (measured:
    docs/experiments/statistics/thread-bits.md). With AMX products depend on it; others were not measured."""
    return has_instructions("amx_bf16") or not has_instructions("avx512_bf16")


def _favours_onednn() -> bool:
    """True if oneDNN's float32 product x Wᵀ is at least as fast as torch's own, which is MKL's on x86.

    MKL's product takes an eighth less time on AMD processors without AVX-512 (measured:
    docs/experiments/statistics/faster-moments.md).
    """
    return not has_instructions("avx2") or has_instructions("avx512_f")


def _added_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor | None:
    """Add left right to a total (m, n); None: torch's own is stable, for any number of inputs."""
    if _are_even(*total.shape) and min(total.shape) >= _MANY:
        return None
    return total.add_(outer_product(left, right.mT))


def _batched_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor | None:
    """left right for left (b, m, k), right (b, k, n); None: torch's own is stable."""
    if _are_even(*left.shape[1:], *right.shape[1:]):
        return None
    return torch.stack([outer_product(*pair) for pair in zip(left, right.mT, strict=True)])
