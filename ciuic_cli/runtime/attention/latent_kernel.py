"""Attention of a few queries over cached latents by the native library, on CPUs with AVX2 or AVX-512.

Source of the method: MLA with absorbed queries (`mla_products`), in blocks of tokens with a running maximum (flash
attention, Dao et al. 2022).
"""

from __future__ import annotations

import ctypes

import torch

from ciuic_cli.codecs import native
from ciuic_cli.runtime.attention.inputs import AttentionInputs

_COLUMNS = 32
"""The kernel multiplies so many columns at once: `kLatentColumns` in native/attention/latent_attention.h."""


def fits(inputs: AttentionInputs) -> bool:
    """Whether the kernel computes this call: of bfloat16 tensors on a CPU that has the instructions."""
    return _multiplies(inputs.query, inputs.latents, inputs.rotary_keys)


def fits_shared_keys(query: torch.Tensor, keys: torch.Tensor) -> bool:
    """The same for the arguments of `attention_with_sinks`."""
    return _multiplies(query, keys)


def _multiplies(query: torch.Tensor, *cached: torch.Tensor) -> bool:
    return (
        all(t.device.type == "cpu" and t.dtype == torch.bfloat16 for t in (query, *cached))
        and all(t.shape[-1] % _COLUMNS == 0 for t in cached)
        and bool(native.interface().ciuic_has_latent_attention())
    )


def attention(absorbed: torch.Tensor, rotary_query: torch.Tensor, inputs: AttentionInputs) -> torch.Tensor:
    """Softmax over the cached tokens, and its mean of the latents.

    Args:
        absorbed: queries in the latents' space, floating [b, heads, s, rank]; rounded to bfloat16.
        rotary_query: [b, heads, s, rope].
        inputs: latents, rotary keys, mask and scaling of a call that `fits`.

    Returns:
        float32 [b, heads, s, rank]. Weights are rounded to bfloat16 before they meet the latents where the processor
        multiplies bfloat16 faster than float32 (AMD's with AVX512_BF16).
    """
    rotary = rotary_query.to(torch.bfloat16).contiguous()
    return _attention(
        absorbed, inputs.latents, inputs.mask, inputs.scaling, (rotary, inputs.rotary_keys), None
    )


def attention_with_sinks(
    query: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor | None, scaling: float, sinks: torch.Tensor
) -> torch.Tensor:
    """Attention of all heads over one key per token, which is its value too (DeepSeek V4).

    Args:
        query: bfloat16 [b, heads, s, columns].
        keys: bfloat16 [b, 1, context, columns].
        mask: None, bool or floating [b, 1 or heads, s, context].
        scaling: factor of the scores.
        sinks: floating [heads]: the score of a token with the value 0.

    Returns:
        float32 [b, heads, s, columns], rounded as by `attention`.
    """
    by_row = sinks.to(torch.float32)[:, None].expand(-1, query.shape[2]).contiguous()
    return _attention(query, keys, mask, scaling, None, by_row)


def _attention(
    query: torch.Tensor,
    latents: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    rotary: tuple[torch.Tensor, torch.Tensor] | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """`rotary`: contiguous queries and keys whose products are added to the scores; sinks: float32 [heads, s]."""
    b, heads, s, rank = query.shape
    query = query.to(torch.bfloat16).contiguous()
    latents = _neighbouring_columns(latents)
    rotary_query, keys = (None, None) if rotary is None else (rotary[0], _neighbouring_columns(rotary[1]))
    bias = None if mask is None else _bias(mask, (b, heads, s, latents.shape[2]))
    out = torch.empty((b, heads, s, rank), dtype=torch.float32)
    call = native.CiuicLatentAttention(
        query.data_ptr(), _address(rotary_query), latents.data_ptr(), _address(keys), _address(bias), _address(sinks),
        latents.stride(0), latents.stride(2),
        0 if keys is None else keys.stride(0), 0 if keys is None else keys.stride(2),
        b, heads * s, latents.shape[2], rank, 0 if keys is None else keys.shape[-1], scaling, 0.0,
    )  # fmt: skip
    status = native.interface().ciuic_latent_attention(
        ctypes.addressof(call), out.data_ptr(), torch.get_num_threads()
    )
    native.check(status, "attention over latents")
    return out


def _address(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _neighbouring_columns(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _bias(mask: torch.Tensor, shape: tuple[int, int, int, int]) -> torch.Tensor:
    """The mask as float32 [b, heads, s, context]. Hidden tokens get the lowest number: a row may hide all of them."""
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    return mask.to(torch.float32).expand(shape).contiguous()
