"""Checkpointed layers of a mixture of experts: the choice of experts is kept, and everything else computed again.

A layer that is computed again from inputs in 8 bits would send about 1 % of its tokens to other experts (measured:
docs/experiments/training/activations.md), whose gradients then belong to another function than the loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

CHOICES = (torch.ops.aten.topk.default,)
"""Operations by which the routers of transformers choose experts, and groups of experts."""


def keep_choices() -> Any:
    """`context_fn` of `torch.utils.checkpoint`: the results of CHOICES are kept, 12 bytes per number chosen."""
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in CHOICES else CheckpointPolicy.PREFER_RECOMPUTE
