"""Steps of decoding that the tests of programs compare, and a module that stands in for a projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import DynamicCache

from ciuic_cli.evaluation.bench_process import cache_keyword

PROMPT = 9
"""Tokens of the prompt."""


class Doubled(nn.Module):
    """Twice the output of another module."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.base(x)


def step_logits(
    model: Any, steps: int = 3, batch: int = 1, mask: torch.Tensor | None = None, **keywords: Any
) -> torch.Tensor:
    """Logits [steps, batch, vocabulary] of single tokens behind a prompt of PROMPT."""
    cache = {cache_keyword(model): DynamicCache(config=model.config)}
    ids = torch.randint(3, 260, (batch, PROMPT + steps), generator=torch.Generator().manual_seed(5))
    found = []
    with torch.inference_mode():
        model(ids[:, :PROMPT], attention_mask=mask, use_cache=True, **cache)
        for token in ids[:, PROMPT:].split(1, dim=1):
            mask = None if mask is None else F.pad(mask, (0, 1), value=1)
            out = model(token, attention_mask=mask, use_cache=True, **cache, **keywords)
            found.append(out.logits[:, -1])
    assert next(iter(cache.values())).get_seq_length() == PROMPT + steps
    return torch.stack(found)
