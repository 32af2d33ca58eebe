"""Attention of a prompt by the native library: queries over keys and values, which may have different widths.

Source of the method: blocks of tokens with a running maximum of the scores (flash attention, Dao et al. 2022). Why not
torch's: docs/experiments/runtime/prompt-attention.md.
"""

from __future__ import annotations

import ctypes

import torch

from ciuic_cli.codecs import native

FEWEST_QUERIES = 4
"""Fewer queries are left to torch. Chosen: the kernel unpacks all keys and values for them."""

_LARGEST = 1024
"""Largest width of keys and values that the kernel takes: kMaxPromptSize in native/attention/prompt_attention.cpp."""

_MOST_SHARED = 192
"""Most query heads of a key-value head that it takes: kPromptRows of `kernels.h`."""


def fits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether `attention` computes this call, and pays.

    Not with AMX, for which torch has faster products; not where gradients, torch.compile or subclasses of tensors (fake
    ones, views of distributed ones) need operations of torch; not with floating masks or masks that differ by head.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    given = (query, key, value)
    if any(type(t) is not torch.Tensor or t.device.type != "cpu" or t.dtype != query.dtype for t in given):
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return False
    b, heads, queries, size = query.shape
    return (
        query.dtype in (torch.bfloat16, torch.float32)
        and queries >= FEWEST_QUERIES
        and all(t.shape[0] == b and t.shape[1] == key.shape[1] > 0 for t in (key, value))
        and heads % key.shape[1] == 0
        and heads // key.shape[1] <= _MOST_SHARED
        and 0 < size == key.shape[-1] <= _LARGEST
        and key.shape[2] == value.shape[2] > 0
        and 0 < value.shape[-1] <= _LARGEST
        and (mask is None or _is_understood(mask, (b, queries, key.shape[2])))
        and native.cpu_kernels() != "amx"
    )


def _is_understood(mask: torch.Tensor, shape: tuple[int, int, int]) -> bool:
    return mask.dtype == torch.bool and mask.shape in ((1, 1, *shape[1:]), (shape[0], 1, *shape[1:]))


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scaling: float,
    is_causal: bool,
) -> torch.Tensor:
    """softmax(scaling * query . key) . value, for a call that `fits`.

    Args:
        query: [b, heads, s, n], bfloat16 or float32.
        key: [b, kv heads, context, n] of the same dtype; neighbouring query heads share a key-value head.
        value: [b, kv heads, context, v].
        mask: None, or bool [b or 1, 1, s, context]: False hides a token.
        scaling: factor of the scores.
        is_causal: query i sees the first i + 1 tokens of the context.

    Returns:
        [b, s, heads, v] of the dtype of the query, rounded once. A query that sees no token gets zeros.
    """
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    b, heads, queries, _ = query.shape
    of_mask = (0, 0)
    if mask is not None:
        mask = mask.contiguous()
        of_mask = (0 if mask.shape[0] == 1 else mask.stride(0), mask.stride(2))
    out = torch.empty((b, queries, heads, value.shape[-1]), dtype=query.dtype)
    call = native.CiuicPromptAttention(
        query.data_ptr(), key.data_ptr(), value.data_ptr(), None if mask is None else mask.data_ptr(),
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *of_mask,
        b, heads, key.shape[1], queries, key.shape[2], key.shape[3], value.shape[3],
        scaling, query.dtype == torch.bfloat16, is_causal, 0,
    )  # fmt: skip
    status = native.interface().ciuic_prompt_attention(
        ctypes.addressof(call), out.data_ptr(), torch.get_num_threads()
    )
    native.check(status, "attention of a prompt")
    return out
