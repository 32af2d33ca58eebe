"""The arguments of attention over cached latents."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionInputs:
    """The arguments of one call of an attention function.

    Attributes:
        query: [b, heads, s, nope + rope].
        latents: [b, 1, context, rank].
        rotary_keys: [b, 1, context, rope].
        mask: [b, 1 or heads, s, context] or None: bool (True: the token is seen), or floating, added to the scores.
        scaling: factor of the scores.
    """

    query: torch.Tensor
    latents: torch.Tensor
    rotary_keys: torch.Tensor
    mask: torch.Tensor | None
    scaling: float
