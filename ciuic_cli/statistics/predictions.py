"""A span of predictions: the gradient of sampled labels, and sums of the Fisher information over tokens.

A prediction is p = softmax(logits). Its Fisher information in the logits is diag(p) - p pᵀ; `head_fisher.py` says what
the sums are for. On a CPU, a kernel of our own computes everything in one pass; torch needs a dozen (measured:
docs/experiments/statistics/native-predictions.md).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from ciuic_cli.codecs import native
from ciuic_cli.profiling.account import count_native

OPERATIONS = 77
"""Operations of the kernel per logit: two exponentials of 28, and 21 others (counted in `prediction_kernel.cpp`)."""


@dataclass(frozen=True)
class Predictions:
    """The predictions of t tokens.

    logits: (t, vocabulary) finite, of any floating dtype. slope: of each logit in the head's output, squared, (t,
    vocabulary) float32; None: 1. draws: (t, 1) float32 in [0, 1), from which labels are drawn. squares: (t,) float32,
    |x|² of the head's inputs.
    """

    logits: torch.Tensor
    slope: torch.Tensor | None
    draws: torch.Tensor
    squares: torch.Tensor

    def add_to(
        self, sums: torch.Tensor, weights: torch.Tensor, *, overwrite: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add Σ p, Σ w, Σ w² and Σ w |x|² over the tokens, with w = p (1 - p) slope.

        Args:
            sums: (4, vocabulary) float32.
            weights: (t, vocabulary) float32 or bfloat16, contiguous; receives w.
            overwrite: whether the gradient may take the memory of the logits.

        Returns:
            The gradient p - onehot(label) in the dtype of the logits, and Σ w (t,) float32 of each token.
        """
        has_kernel = self.logits.device.type == "cpu" and self.logits.dtype in (torch.float32, torch.bfloat16)
        return self._native(sums, weights, overwrite) if has_kernel else self._torch(sums, weights)

    def _native(
        self, sums: torch.Tensor, weights: torch.Tensor, overwrite: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.logits.contiguous()
        slope = None if self.slope is None else self.slope.contiguous()
        draws, squares = self.draws.contiguous(), self.squares.contiguous()
        gradient = logits if overwrite else torch.empty_like(logits)
        token_weights = torch.empty(len(logits))
        call = native.CiuicPredictions(
            logits.data_ptr(), None if slope is None else slope.data_ptr(), draws.data_ptr(), squares.data_ptr(),
            *logits.shape, logits.dtype == torch.bfloat16, weights.dtype == torch.bfloat16,
        )  # fmt: skip
        status = native.interface().ciuic_predictions(
            ctypes.byref(call), gradient.data_ptr(), weights.data_ptr(), token_weights.data_ptr(), sums.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        native.check(status, "adding predictions")
        read = 2 * logits.nbytes + (0 if slope is None else slope.nbytes)
        count_native(torch.float32, OPERATIONS * logits.numel(), read + gradient.nbytes + weights.nbytes)
        return gradient, token_weights

    def _torch(self, sums: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        probability = self.logits.float().softmax(-1)
        exact = torch.addcmul(probability, probability, probability, value=-1)
        if self.slope is not None:
            exact *= self.slope
        sums += torch.stack((probability.sum(0), exact.sum(0), exact.square().sum(0), self.squares @ exact))
        weights.copy_(exact)
        return sampled_gradient(probability, self.draws).to(self.logits.dtype), exact.sum(1)


def sampled_gradient(probability: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Gradient in the logits of the cross entropy with one label per token drawn from the prediction.

    Labels are drawn by inversion of the cumulative distribution: torch.multinomial is many times slower.

    Args:
        probability: (tokens, vocabulary) float32; overwritten by the result.
        draws: (tokens, 1) float32 in [0, 1).

    Returns:
        (tokens, vocabulary) float32.
    """
    cumulative = probability.cumsum(-1)
    # Right: a label without probability is never drawn, not even by a draw of 0.
    labels = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True)
    labels = labels.clamp_(max=probability.shape[1] - 1)[:, 0]
    probability[torch.arange(len(probability)), labels] -= 1.0
    return probability
