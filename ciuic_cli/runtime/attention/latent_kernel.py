"""Attention of a few queries over cached latents by the native library, on CPUs that multiply bfloat16.

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
    """Whether the kernel computes this call: in bfloat16 on a CPU that has the instructions."""
    tensors = (inputs.query, inputs.latents, inputs.rotary_keys)
    return (
        all(t.device.type == "cpu" and t.dtype == torch.bfloat16 for t in tensors)
        and inputs.latents.shape[-1] % _COLUMNS == 0
        and inputs.rotary_keys.shape[-1] % _COLUMNS == 0
        and bool(native.interface().ciuic_has_latent_attention())
    )


def attention(absorbed: torch.Tensor, rotary_query: torch.Tensor, inputs: AttentionInputs) -> torch.Tensor:
    """Softmax over the cached tokens, and its mean of the latents.

    Args:
        absorbed: queries in the latents' space, floating [b, heads, s, rank]; rounded to bfloat16.
        rotary_query: [b, heads, s, rope].
        inputs: latents, rotary keys, mask and scaling of a call that `fits`.

    Returns:
        float32 [b, heads, s, rank]. Weights are rounded to bfloat16 before they meet the latents.
    """
    b, heads, s, rank = absorbed.shape
    query = absorbed.to(torch.bfloat16).contiguous()
    rotary = rotary_query.to(torch.bfloat16).contiguous()
    latents, keys = (_neighbouring_columns(t) for t in (inputs.latents, inputs.rotary_keys))
    bias = None if inputs.mask is None else _bias(inputs.mask, (b, heads, s, latents.shape[2]))
    out = torch.empty((b, heads, s, rank), dtype=torch.float32)
    call = native.CiuicLatentAttention(
        query.data_ptr(), rotary.data_ptr(), latents.data_ptr(), keys.data_ptr(),
        None if bias is None else bias.data_ptr(),
        latents.stride(0), latents.stride(2), keys.stride(0), keys.stride(2),
        b, heads * s, latents.shape[2], rank, keys.shape[-1], inputs.scaling, 0.0,
    )  # fmt: skip
    status = native.interface().ciuic_latent_attention(
        ctypes.addressof(call), out.data_ptr(), torch.get_num_threads()
    )
    native.check(status, "attention over latents")
    return out


def _neighbouring_columns(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _bias(mask: torch.Tensor, shape: tuple[int, int, int, int]) -> torch.Tensor:
    """The mask as float32 [b, heads, s, context]. Hidden tokens get the lowest number: a row may hide all of them."""
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    return mask.to(torch.float32).expand(shape).contiguous()
