"""Attention of whole sequences on a CPU by the native library, in place of torch's `scaled_dot_product_attention`.

Source of the method: blocks of tokens with a running maximum of the scores (flash attention, Dao et al. 2022). Why not
torch's: docs/experiments/statistics/sequence-attention.md.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from ciuic_cli.codecs import native
from ciuic_cli.profiling.account import count_native

_LARGEST = 1024
"""Largest width of keys and values that the kernel takes: kMaxSize in native/attention/sequence_attention.cpp."""


class NativeAttention(TorchFunctionMode):
    """While active, `scaled_dot_product_attention` is `sequence_attention` where that computes the call."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        found = sequence_attention(*args, **(kwargs or {})) if func is scaled_dot_product_attention else None
        return func(*args, **(kwargs or {})) if found is None else found


def sequence_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    """As `torch.nn.functional.scaled_dot_product_attention`, differentiable; None for a call that torch should compute.

    Those are calls on other devices, with dropout, with masks that are not bool or differ by head, and calls on
    processors for which there is no kernel: with AMX, or without AVX2 and FMA. Under autocast, the arguments are
    rounded as torch rounds them. A query that sees no token gets zeros. The bits do not depend on the number of
    threads.

    Args:
        query: (b, heads, s, n); key: (b, kv heads, context, n); value: (b, kv heads, context, v).

    Returns:
        (b, heads, s, v), in memory (b, s, heads, v).
    """
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (
            each.to(dtype) if each.is_floating_point() else each for each in (query, key, value)
        )
    shared = enable_gqa or query.dim() != 4 or query.shape[1] == key.shape[1]
    if dropout_p or not shared or not _fits(query, key, value, attn_mask, is_causal):
        return None
    scaling = query.shape[-1] ** -0.5 if scale is None else scale
    if scaling <= 0:
        return None
    out: torch.Tensor = _Attention.apply(query, key, value, attn_mask, scaling, is_causal)
    return out


def _fits(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, is_causal: bool
) -> bool:
    given = (query, key, value)
    if any(each.device.type != "cpu" or each.dtype != query.dtype or each.dim() != 4 for each in given):
        return False
    b, heads, queries, size = query.shape
    context = key.shape[2]
    return (
        query.dtype in (torch.bfloat16, torch.float32)
        and all(each.shape[0] == b and each.shape[1] == key.shape[1] > 0 for each in (key, value))
        and heads % key.shape[1] == 0
        and 0 < size == key.shape[3] <= _LARGEST
        and 0 < value.shape[3] <= _LARGEST
        and context == value.shape[2] > 0
        and b > 0 < queries
        and (not is_causal or (mask is None and queries == context))
        and (
            mask is None
            or (
                mask.dtype == torch.bool
                and mask.shape in ((1, 1, queries, context), (b, 1, queries, context))
            )
        )
        and bool(native.interface().ciuic_has_sequence_attention(query.dtype == torch.bfloat16))
    )


class _Attention(torch.autograd.Function):
    """Saves what flash attention needs to make the weights again: logarithms of their sums."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float,
        is_causal: bool,
    ) -> torch.Tensor:
        query, key, value = (
            each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, value)
        )
        mask = None if mask is None else mask.contiguous()
        b, heads, queries, _ = query.shape
        out = torch.empty((b, queries, heads, value.shape[3]), dtype=query.dtype)
        log_sums = torch.empty((b, heads, queries))
        _call(query, key, value, mask, scaling, is_causal, out, log_sums)
        ctx.save_for_backward(query, key, value, mask, out, log_sums)
        ctx.scaling, ctx.is_causal = scaling, is_causal
        return out.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, mask, out, log_sums = ctx.saved_tensors
        given = gradients[0].transpose(1, 2).to(query.dtype).contiguous()
        # In memory (b, tokens, heads, n), as projections make and read them.
        found = [torch.empty(each.transpose(1, 2).shape, dtype=each.dtype) for each in (query, key, value)]
        _call(query, key, value, mask, ctx.scaling, ctx.is_causal, out, log_sums, given, found)
        return *(each.transpose(1, 2) for each in found), None, None, None


def _call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    is_causal: bool,
    out: torch.Tensor,
    log_sums: torch.Tensor,
    gradient: torch.Tensor | None = None,
    found: list[torch.Tensor] | None = None,
) -> None:
    b, heads, queries, size = query.shape
    of_mask = (0, 0) if mask is None else (0 if mask.shape[0] == 1 else mask.stride(0), mask.stride(2))
    call = native.CiuicSequenceAttention(
        query.data_ptr(), key.data_ptr(), value.data_ptr(), None if mask is None else mask.data_ptr(),
        out.data_ptr(), log_sums.data_ptr(), None if gradient is None else gradient.data_ptr(),
        *(each.data_ptr() for each in found or ()), *([None] * (0 if found else 3)),
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *of_mask,
        b, heads, key.shape[1], queries, key.shape[2], size, value.shape[3],
        scaling, query.dtype == torch.bfloat16, is_causal, 0,
    )  # fmt: skip
    status = native.interface().ciuic_sequence_attention(ctypes.addressof(call), torch.get_num_threads())
    native.check(status, "attention of sequences")
    products = (
        b * heads * queries * key.shape[2] * (size + value.shape[3])
    )  # as profiling counts torch's attention
    arrays = (query, key, value, out, *(found or ()))
    count_native(query.dtype, 5 * products if found else 2 * products, sum(each.nbytes for each in arrays))
