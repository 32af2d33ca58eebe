"""Attention modules of transformers whose prompts the native library attends to.

The module's own `forward` stays; `config` names an attention function that is registered here, in place of "sdpa"
(torch's `scaled_dot_product_attention`). Calls that the kernel does not compute, single tokens among them, go on to
that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ciuic_cli.runtime.attention import prompt_kernel
from ciuic_cli.runtime.attention.redirected import RedirectedAttention
from ciuic_cli.runtime.mixed_classes import Mixin, mixed_class
from ciuic_cli.runtime.modules import CompressedLinear

IMPLEMENTATION = "ciuic_prompt"
"""Name of the attention function among transformers' own."""

REPLACED = "sdpa"
"""The implementation that it takes the place of; with another one the module stays as it is."""

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class PromptAttention(RedirectedAttention):
    """Mixin for attention classes that call an attention function with queries, keys and values."""

    implementation = IMPLEMENTATION
    replaced = REPLACED


def implementation_of_model(module: Any) -> Any:
    """The attention implementation that the model's configuration has, whatever `config` says."""
    config = module.__dict__.get("config", None)
    return (module.config if config is None else config)._attn_implementation


def prompt_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """An attention function of transformers: that of "sdpa", with prompts computed by the native library.

    Args:
        query: [b, heads, s, n].
        key, value: [b, kv heads, context, n or v].
        attention_mask, dropout, scaling, is_causal, position_bias, kwargs: as for transformers' "sdpa".

    Returns:
        ([b, s, heads, v], None).
    """
    if dropout == 0.0 and position_bias is None and prompt_kernel.fits(query, key, value, attention_mask):
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        out = prompt_kernel.attention(
            query, key, value, attention_mask,
            scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
            is_causal=bool(causal) and attention_mask is None,
        )  # fmt: skip
        return out, None
    found: tuple[torch.Tensor, torch.Tensor | None] = ALL_ATTENTION_FUNCTIONS[REPLACED](
        module, query, key, value, attention_mask,
        dropout=dropout, scaling=scaling, is_causal=is_causal, position_bias=position_bias, **kwargs,
    )  # fmt: skip
    return found


def adapt_prompt_attention(model: nn.Module) -> None:
    """Change the class of every attention with compressed projections that has no other mixin, in place."""
    for module in list(model.modules()):
        if isinstance(module, Mixin) or "config" not in vars(module) or "config" in vars(type(module)):
            continue
        if all(isinstance(module._modules.get(name), CompressedLinear) for name in _PROJECTIONS):
            kind: Any = type(module)
            module.__class__ = mixed_class(PromptAttention, kind)
            _ = module.config  # made now, so that compiled code only reads it


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, prompt_attention)
