"""DeepSeek V4's attention: all heads share one key per token, which is its value too.

transformers copies the keys and the values once per head, and keeps all attention weights between two products. A few
queries over a long context read those copies from memory. Here the native kernel of attention over latents reads the
keys once for 16 heads.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ciuic_cli.runtime.attention import latent_kernel
from ciuic_cli.runtime.attention.redirected import RedirectedAttention
from ciuic_cli.runtime.mixed_classes import mixed_class, original_class

IMPLEMENTATION = "ciuic_shared_keys"
"""Name of the attention function among transformers' own."""

BIAS_BYTES = 16 << 20
"""Most memory of the mask as float32, a copy per head: more queries are left to transformers. Chosen."""


class SharedKeyAttention(RedirectedAttention):
    """Mixin for the attention class of DeepSeek V4."""

    implementation = IMPLEMENTATION


def adapt_shared_keys(model: nn.Module) -> None:
    """Let every attention of DeepSeek V4 in a loaded model use the kernel, in place; twice changes nothing more."""
    for module in model.modules():
        if type(module).__name__ == "DeepseekV4Attention" and not isinstance(module, SharedKeyAttention):
            kind: Any = type(module)
            module.__class__ = mixed_class(SharedKeyAttention, kind)
            _ = module.config  # made now, so that compiled code only reads it


def shared_key_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """An attention function of transformers for modules with `SharedKeyAttention`.

    Args:
        query: [b, heads, s, columns].
        key, value: [b, 1, context, columns], the same tensor.
        attention_mask: None, or floating or bool [b, 1, s, context].
        scaling: factor of the scores.
        dropout: of the attention weights, in training.
        s_aux: [heads], the score of a token without value.
        kwargs: handed on where transformers' own attention function is called.

    Returns:
        ([b, s, heads, columns], attention weights [b, heads, s, context] or None where the kernel computed them).
    """
    b, heads, s, _ = query.shape
    kernel_computes = (
        key is value
        and s_aux is not None
        and not dropout
        and not kwargs.get("output_attentions", getattr(module.config, "output_attentions", False))
        and not torch.compiler.is_compiling()
        and not (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad))
        and 4 * b * heads * s * key.shape[2] <= BIAS_BYTES
        and latent_kernel.fits_shared_keys(query, key)
    )
    if kernel_computes and s_aux is not None:
        out = latent_kernel.attention_with_sinks(query, key, attention_mask, scaling, s_aux)
        return out.to(query.dtype).transpose(1, 2).contiguous(), None
    eager = sys.modules[original_class(module).__module__].eager_attention_forward
    function = ALL_ATTENTION_FUNCTIONS.get_interface(module.config.implementation_of_model, eager)
    found: tuple[torch.Tensor, torch.Tensor | None] = function(
        module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, s_aux=s_aux, **kwargs
    )
    return found


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, shared_key_attention)
