"""MLA attention modules of transformers, made to attend over cached latents without expanding the whole context.

transformers caches latents, and at every step expands all of them through `kv_b_proj` before it calls an attention
function. Two small changes of the module's class lead its own `forward` to `runtime.attention.mla_products` instead:
`expand_kv` hands the latents on as they are, and `config` names an attention function that is registered here.
Everything else (projections, rotary embedding, cache, indexer of V3.2) stays transformers' own code.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ciuic_cli.codecs.transform import padded
from ciuic_cli.runtime import ops, products
from ciuic_cli.runtime.attention import growing_cache, mla_products
from ciuic_cli.runtime.attention.inputs import AttentionInputs
from ciuic_cli.runtime.attention.mla_products import HeadShape, UpProjection
from ciuic_cli.runtime.attention.redirected import RedirectedAttention
from ciuic_cli.runtime.mixed_classes import mixed_class, original_class
from ciuic_cli.runtime.modules import CompressedLinear

IMPLEMENTATION = "ciuic_latent"
"""Name of the attention function among transformers' own."""

UNDERSTOOD = ("eager", "sdpa")
"""Attention implementations whose masks (None, 4-D bool or 4-D floating) are understood here. With another one (flash
attention, flex attention, paged) the module expands the whole context and calls it, as transformers does."""

UNKNOWN_TERMS = ("s_aux", "position_bias", "softcap", "cache")
"""Arguments of attention functions that change the scores (sinks, biases) or the cache in ways not computed here."""

DECODED_SHARE = 0.015
"""Rows of `kv_b_proj` stay decoded in memory if those of all layers take at most this share of the model's bytes on
their device (0.6 % of DeepSeek-V3, 1.4 % of V2-Lite, on one device); otherwise every call decodes them. With the other
derived fields of a loaded model (0.5 %, mostly row scales) this keeps the promise of 1.02 times the artifact."""


class LatentAttention(RedirectedAttention):
    """Mixin for the attention classes of DeepSeek V2, V3 and V3.2."""

    implementation = IMPLEMENTATION

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As the original class; the layer's cache grows in place."""
        for name in ("past_key_values", "cache"):  # transformers up to 5.23, and from 5.24 on
            if kwargs.get(name) is not None and not torch.compiler.is_compiling():
                growing_cache.let_grow(kwargs[name], self.layer_idx)
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    def expand_kv(
        self, latents: torch.Tensor, rotary_keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Nothing is expanded: the attention function takes latents and rotary keys."""
        return latents, rotary_keys


def is_latent_attention(module: nn.Module) -> bool:
    """Whether the module is an MLA attention with a compressed `kv_b_proj`."""
    return (
        isinstance(getattr(module, "kv_b_proj", None), CompressedLinear)
        and hasattr(type(module), "expand_kv")
        and all(
            hasattr(module, name) for name in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "layer_idx")
        )
    )


def attend_to_latents(module: nn.Module) -> None:
    """Change the class of an MLA attention module, in place; twice changes nothing more."""
    if not isinstance(module, LatentAttention):
        kind: Any = type(module)
        module.__class__ = mixed_class(LatentAttention, kind)
        _ = module.config  # made now, so that compiled code only reads it


def adapt_latent_attention(model: nn.Module) -> None:
    """Let every MLA attention of a loaded model attend to its latents, and keep `kv_b_proj` decoded if that fits."""
    modules: list[Any] = [module for module in model.modules() if is_latent_attention(module)]
    for module in modules:
        attend_to_latents(module)
    dtype = getattr(model, "dtype", torch.float32)
    kept = products.multiply_dtype(torch.empty(0, dtype=dtype))
    # By device, so that the weights of main memory give no share to a GPU's.
    total: dict[torch.device, int] = defaultdict(int)
    for tensor in (*model.parameters(), *model.buffers()):
        total[tensor.device] += tensor.nbytes
    at_hand: dict[torch.device, list[Any]] = defaultdict(list)
    for module in modules:
        if _is_at_hand(module.kv_b_proj):
            at_hand[module.kv_b_proj.blob.device].append(module.kv_b_proj)
    for device, projections in at_hand.items():
        if _decoded_bytes(projections, kept) <= DECODED_SHARE * total[device]:
            for projection in projections:
                projection.keep_decoded(kept)


def decoded_bytes(model: nn.Module) -> int:
    """Bytes of the rows that `adapt_latent_attention` keeps decoded once the model is loaded onto one device."""
    projections: list[Any] = [module.kv_b_proj for module in model.modules() if is_latent_attention(module)]
    kept = products.multiply_dtype(torch.empty(0, dtype=getattr(model, "dtype", torch.float32)))
    total = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    needed = _decoded_bytes(projections, kept)
    return needed if needed <= DECODED_SHARE * total else 0


def _decoded_bytes(projections: list[Any], dtype: torch.dtype) -> int:
    return sum(p.out_features * padded(p.in_features) * dtype.itemsize for p in projections)


def latent_attention(
    module: Any,
    query: torch.Tensor,
    latents: torch.Tensor,
    rotary_keys: torch.Tensor,
    attention_mask: Any,
    scaling: float,
    dropout: float = 0.0,
    indices: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """An attention function of transformers for modules with `LatentAttention`.

    Args:
        query: [b, heads, s, nope + rope].
        latents: [b, 1, context, kv_lora_rank].
        rotary_keys: [b, 1, context, rope].
        attention_mask: whatever the model's attention implementation uses.
        scaling: factor of the scores.
        dropout: of the attention weights, in training.
        indices: None, or int [b, s, k]: the only tokens that each query sees (the indexer of DeepSeek V3.2).
        kwargs: handed on where transformers' own attention function is called.

    Returns:
        ([b, s, heads, v], attention weights [b, heads, s, context] or None).
    """
    implementation = module.config.implementation_of_model
    understood = implementation in UNDERSTOOD
    needs_graph = torch.is_grad_enabled() and query.requires_grad
    expands = (
        not understood or dropout or needs_graph or any(kwargs.get(n) is not None for n in UNKNOWN_TERMS)
    )
    if understood and indices is not None:
        few = query.shape[2] == 1 and indices.shape[-1] < latents.shape[2]
        if few and implementation == "sdpa" and not expands:
            latents, rotary_keys, attention_mask = _chosen(indices, latents, rotary_keys, attention_mask)
        else:
            attention_mask = _hiding_others(indices, attention_mask, query.dtype)
    if expands:
        if not understood:
            kwargs["indices"] = indices
        return _expanded_by_transformers(
            module, query, latents, rotary_keys, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    if implementation == "eager":
        return _eager(module, query, latents, rotary_keys, attention_mask, scaling, **kwargs)
    is_causal = attention_mask is None and query.shape[2] > 1 and kwargs.get("is_causal") is not False
    if is_causal and latents.shape[2] > query.shape[2]:
        # The first call with an empty static cache: there are no tokens beyond the queries yet.
        latents, rotary_keys = latents[:, :, : query.shape[2]], rotary_keys[:, :, : query.shape[2]]
    inputs = AttentionInputs(query, latents, rotary_keys, attention_mask, scaling)
    projection = module.kv_b_proj
    if _is_untouched(projection) and _is_at_hand(projection):
        out = ops.latent_attention(
            inputs, projection.blob, projection.decoded,
            nope=module.qk_nope_head_dim, v=module.v_head_dim, is_causal=is_causal,
        )  # fmt: skip
        return out, None
    out = mla_products.attention(_up_projection(module, query), inputs, is_causal=is_causal)
    return out.transpose(1, 2).contiguous(), None


def _eager(
    module: Any,
    query: torch.Tensor,
    latents: torch.Tensor,
    rotary_keys: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The implementation "eager": attention weights are part of the result, and the mask says what is causal."""
    shape = {"rank": module.kv_lora_rank, "nope": module.qk_nope_head_dim, "v": module.v_head_dim}
    rope = module.qk_rope_head_dim
    if not mla_products.absorbing_is_cheaper(query.shape[2], latents.shape[2], rope=rope, **shape):
        return _expanded_by_transformers(module, query, latents, rotary_keys, mask, scaling=scaling, **kwargs)
    inputs = AttentionInputs(query, latents, rotary_keys, mask, scaling)
    out, weights = mla_products.absorbed_attention_weights(_up_projection(module, query), inputs)
    return out.transpose(1, 2).contiguous(), weights


def _is_untouched(projection: nn.Module) -> bool:
    """Whether calling the module would compute x W^T and nothing else: no adapter around it, no hooks on it."""
    return (
        type(projection) is CompressedLinear
        and not projection._forward_hooks
        and not projection._forward_pre_hooks
    )


def _is_at_hand(projection: nn.Module) -> bool:
    """Whether the blob is on its device now: accelerate replaces `forward` of modules that it offloads."""
    return "forward" not in vars(projection) and not projection.blob.is_meta


def _up_projection(module: Any, query: torch.Tensor) -> UpProjection:
    """The rows of `kv_b_proj`, whatever wraps it: from its codes, or else from its output for unit vectors."""
    projection = module.kv_b_proj
    rank = module.kv_lora_rank
    shape = HeadShape(module.num_heads, module.qk_nope_head_dim, products.multiply_dtype(query))
    if _is_untouched(projection):
        found: UpProjection = projection(shape)
        return found
    unit = torch.eye(rank, dtype=query.dtype, device=query.device)
    weight = projection(unit).T.to(shape.dtype).reshape(shape.heads, -1, rank)
    return UpProjection(weight, rank, shape.nope)


def _chosen(
    indices: torch.Tensor, latents: torch.Tensor, rotary_keys: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Latents, rotary keys and mask of the tokens in `indices` [b, 1, k] only."""
    b, context = latents.shape[0], latents.shape[2]
    index = indices[:, 0].long()  # [b, k]
    # Whole rows: `gather` would look up every element, which takes 20 times as long.
    rows = (index + context * torch.arange(b, device=index.device)[:, None]).flatten()
    chosen = (
        t.reshape(b * context, -1).index_select(0, rows).view(b, 1, -1, t.shape[-1])
        for t in (latents, rotary_keys)
    )
    if mask.shape[0] == b:
        seen = mask.reshape(-1).index_select(0, rows).view(b, 1, 1, -1)
    else:
        seen = mask.gather(-1, index[:, None, None])
    return (*chosen, seen)  # type: ignore[return-value]


def _hiding_others(indices: torch.Tensor, mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The mask [b, 1, s, context], with the tokens that are not in `indices` [b, s, k] hidden too."""
    hidden = torch.ones(mask.shape[0], indices.shape[1], mask.shape[-1], dtype=torch.bool, device=mask.device)
    hidden = hidden.scatter(-1, indices.long(), False).unsqueeze(1)
    if mask.dtype == torch.bool:
        return mask & ~hidden
    return mask.masked_fill(hidden, torch.finfo(dtype).min)


def _expanded_by_transformers(
    module: Any,
    query: torch.Tensor,
    latents: torch.Tensor,
    rotary_keys: torch.Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Expand the whole context and call the model's own attention function, as transformers does."""
    kind = original_class(module)
    key, value = kind.expand_kv(module, latents, rotary_keys)
    eager = sys.modules[kind.__module__].eager_attention_forward
    function = ALL_ATTENTION_FUNCTIONS.get_interface(module.config.implementation_of_model, eager)
    found: tuple[torch.Tensor, torch.Tensor | None] = function(
        module, query, key, value, attention_mask, **kwargs
    )
    return found


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, latent_attention)
