"""Short names for training in less memory from Python. They add nothing to what they name.

    model = ActivationCache.around(model)         # activations in 8 bits
    optimizer = LowBitAdamW(model, lr=1e-4)       # weights in 8 bits, updates inside the backward pass
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()

What they are not: no activation is left out, no gradient is made sparse, and nothing is lossless. Activations and
weights are rounded to blocks of 8-bit integers, with the errors that docs/experiments/training/ shows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ciuic_cli.train.memory.activations import ActivationStore
from ciuic_cli.train.memory.adaptive import AdaptiveQuantizer
from ciuic_cli.train.memory.weights import LayerwiseOptimizer

__all__ = ["ActivationCache", "AdaptiveQuantizer", "CachedModel", "LowBitAdamW"]


class ActivationCache(ActivationStore):
    """`ActivationStore` by another name: a context manager around the forward pass."""

    @classmethod
    def around(cls, model: nn.Module) -> CachedModel:
        """The model with a cache around each of its forward passes."""
        return CachedModel(model, cls(model))


class CachedModel(nn.Module):
    """A model whose every forward pass runs in an `ActivationCache`, `cache`. Its parameters are those of `model`."""

    def __init__(self, model: nn.Module, cache: ActivationCache) -> None:
        super().__init__()
        self.model, self.cache = model, cache

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """As the model's forward."""
        with self.cache:
            return self.model(*arguments, **options)


class LowBitAdamW(LayerwiseOptimizer):
    """`LayerwiseOptimizer` with AdamW's states in 8 bits (bitsandbytes): 3.07 bytes per parameter with the weights.

    Args:
        model: of transformers, in float32 or bfloat16, on its device.
        lr: learning rate. betas, eps, weight_decay: as of torch's AdamW.
        sync_steps, seed, quantizer: as of `LayerwiseOptimizer`; `AdaptiveQuantizer()` stores some rows in 4 bits.

    Raises:
        ImportError: bitsandbytes is missing (`pip install "ciuic-cli[lowbit]"`).
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        sync_steps: int = 100,
        seed: int = 0,
        quantizer: AdaptiveQuantizer | None = None,
    ) -> None:
        from bitsandbytes.optim import AdamW8bit

        def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            made: torch.optim.Optimizer = AdamW8bit(
                parameters, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay
            )
            return made

        super().__init__(model, make, lr, sync_steps=sync_steps, seed=seed, quantizer=quantizer)
