"""Predictions of a model on disk, in two bytes for each token of the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from ciuic_cli.layerwise.activation_store import ActivationStore

_STEPS = 2048
"""Steps of a stored logarithm in one nat. Half a step is 0.00024 nats, and the errors of a vocabulary's tokens are
independent (measured: docs/experiments/scale/disk.md)."""
_RANGE = torch.iinfo(torch.int16)
"""The range of stored numbers. The greatest stands for a logarithm of 0, the least for -32. A token that is less likely
than e^-32 = 1e-14 counts as if its probability were that."""
BLOCK_TOKENS = 16
"""Tokens that are converted and compared at a time. 1, 2 and 4 take as long (measured:
docs/experiments/scale/heads-side-by-side.md)."""


class StoredPredictions:
    """Log-probabilities of tokens by name, in files of 16-bit numbers in `folder`.

    The rounded probabilities add up to 1 again when they are read. So the KL divergence of equal predictions is 0 but
    for the square of the rounding, and that of others is off by a share of |log p - log q|, not by a constant.
    """

    def __init__(self, folder: Path) -> None:
        self._files = ActivationStore(folder, torch.int16)

    def put(self, name: str, logits: torch.Tensor) -> None:
        """Store the predictions of logits (t, vocabulary), any floating dtype."""
        stored = torch.empty(logits.shape, dtype=torch.int16)
        for tokens, target in zip(logits.split(BLOCK_TOKENS), stored.split(BLOCK_TOKENS), strict=True):
            log_p = tokens.float().log_softmax(-1)
            target.copy_(log_p.mul_(_STEPS).add_(_RANGE.max).round_().clamp_(_RANGE.min, _RANGE.max))
        self._files.put(name, stored)

    def blocks(self, name: str, device: torch.device, tokens: int) -> Iterator[torch.Tensor]:
        """Log-probabilities (block, vocabulary) float32 of the first tokens under this name, BLOCK_TOKENS at a time."""
        steps = self._files.get(name, device, torch.int16)[:tokens]
        for block in steps.split(BLOCK_TOKENS):
            yield block.float().div_(_STEPS).log_softmax(-1)
