"""The head: gradients of sampled labels for the layers below, and the Fisher information of its rows.

The loss of a token is the cross entropy with one label drawn from the model's own prediction p. Its gradient in the
logits, p - onehot(label), has the second moment diag(p) - p pᵀ: the Fisher information of the prediction. The backward
sweep begins with this gradient (`sampled_gradient`).

The head itself needs no labels (`HeadSums`). The squared gradient of row v has the expectation w_v = p_v (1 - p_v) c².
Here c is the slope of the function between head and logits (a factor, a soft cap). Rare tokens thus have a smooth
estimate instead of a few counts. Over all tokens with head inputs x:

    H           Σ (Σ_v w_v) x xᵀ, to unit trace           (n, n)
    G           Σ w_v |x|² per token, the diagonal        (vocabulary,)
    frequency   Σ p_v, to unit sum                        (vocabulary,)
    contexts    the direction of row v's own inputs       (vocabulary, n), see `context_vectors`
"""

from __future__ import annotations

import torch

from ciuic_cli.layerwise.logits import LEAST_TOKENS
from ciuic_cli.process.threads import one_thread
from ciuic_cli.statistics.moments import Moments

WEIGHT_BYTES = 64 << 20
"""Most bytes of the weights w of tokens that are kept. Chosen: 680 tokens in bfloat16 with a vocabulary of 49,152."""
ROWS_AT_ONCE = 4096
"""Rows of the head whose sums are updated at a time, so that a product stays in a cache. Chosen, not tuned."""


def sequence_seed(seed: int, sequence: int) -> int:
    """Seed for the labels of one sequence, from its number in the text. It does not depend on the worker."""
    return (seed << 30) + sequence


def sampled_gradient(probability: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Gradient in the logits of the cross entropy with one label per token drawn from the prediction.

    Labels are drawn by inversion of the cumulative distribution: torch.multinomial is many times slower.

    Args:
        probability: (tokens, vocabulary) float32; overwritten by the result.

    Returns:
        (tokens, vocabulary) float32.
    """
    cumulative = probability.cumsum(-1)
    draw = (
        torch.rand((len(probability), 1), generator=generator, device=probability.device) * cumulative[:, -1:]
    )
    labels = torch.searchsorted(cumulative, draw).clamp_(max=probability.shape[1] - 1)[:, 0]
    probability[torch.arange(len(probability)), labels] -= 1.0
    return probability


def squared_slope(logits: torch.Tensor, output: torch.Tensor) -> torch.Tensor | float:
    """Squared derivative of each logit in the head's output: 1.0 if they are the same tensor, else (t, vocabulary).

    logits, output: (1, t, vocabulary). The function between them must be element by element (a factor, a soft cap).
    """
    if logits is output:
        return 1.0
    (slope,) = torch.autograd.grad(logits.sum(), output, retain_graph=True)
    return slope[0].float().square()


class HeadSums:
    """Sums over the tokens of a segment of the text, each in a `Moments` so that workers can add them up.

    The sums Σ w_v x are as large as the head. So the weights of many tokens are kept until `WEIGHT_BYTES` are full, and
    their product with the inputs is added at once (measured: docs/experiments/scale/head-sums.md).

    Attributes:
        moments: H (n, n) and the diagonal of G (vocabulary,).

    Args:
        cols: n, the inputs of the head.
        dtype: of the products for the rows, of which contexts are made.
    """

    def __init__(self, vocabulary: int, cols: int, device: torch.device, dtype: torch.dtype) -> None:
        self.moments = Moments.zeros(vocabulary, cols, device, torch.float32, full_outputs=False)
        self._rows = Moments(
            torch.zeros(vocabulary, cols, device=device),
            torch.zeros(3, vocabulary, device=device),
            dtype=dtype,
        )
        tokens = max(LEAST_TOKENS, WEIGHT_BYTES // (dtype.itemsize * vocabulary))
        self._weights = torch.empty(tokens, vocabulary, dtype=dtype, device=device)
        self._inputs = torch.empty(tokens, cols, dtype=dtype, device=device)
        self._kept = 0

    def add(self, x: torch.Tensor, probability: torch.Tensor, slope: torch.Tensor | float) -> None:
        """Add tokens: head inputs x (t, n), predictions (t, vocabulary), both float32, and `squared_slope`."""
        weights = torch.addcmul(probability, probability, probability, value=-1)
        if isinstance(slope, torch.Tensor):
            weights *= slope
        token_weights, squares = weights.sum(1), x.square().sum(1)
        self.moments.inputs.addmm_((x * token_weights[:, None]).T, x)
        self.moments.outputs += squares @ weights
        with one_thread():
            self.moments.trace += float((token_weights * squares).sum())
        self.moments.tokens += x.shape[0]
        self._rows.outputs += torch.stack((probability.sum(0), weights.sum(0), weights.square().sum(0)))
        begin = 0
        while begin < len(x):
            end = min(len(x), begin + len(self._weights) - self._kept)
            kept = slice(self._kept, self._kept + end - begin)
            self._weights[kept], self._inputs[kept] = weights[begin:end], x[begin:end]
            self._kept, begin = kept.stop, end
            if self._kept == len(self._weights):
                self._add_rows()

    def rows(self) -> Moments:
        """Inputs (vocabulary, n), Σ w_v x by row; outputs (3, vocabulary): Σ p_v, Σ w_v and Σ w_v²."""
        self._add_rows()
        return self._rows

    def _add_rows(self) -> None:
        """Add the products of the weights and inputs that are kept, a few thousand rows at a time."""
        weights, inputs = self._weights[: self._kept], self._inputs[: self._kept]
        for begin in range(0, weights.shape[1], ROWS_AT_ONCE):
            rows = slice(begin, begin + ROWS_AT_ONCE)
            self._rows.inputs[rows] += weights[:, rows].T @ inputs
        self._kept = 0


def token_frequency(rows: Moments, tokens: int) -> torch.Tensor:
    """Expected share (tokens,) of each token in text, as the model predicts it; from `HeadSums.rows`.

    tokens: rows of the embedding, which may be more than those of the head: tokens that are never predicted (Moshi).
    """
    total = rows.outputs[0][:tokens]
    total = torch.nn.functional.pad(total, (0, tokens - len(total)))
    with one_thread():
        return total / total.sum()


def context_vectors(rows: Moments, fisher: torch.Tensor) -> torch.Tensor:
    """`Statistics.contexts` (vocabulary, n); overwrites rows.inputs.

    For row v with mean input x̄_v = Σ w_v x / Σ w_v the result is x̄_v (k / (k + 1) · Σ w_v / Σ w_v |x|²)^½, in which
    k = (Σ w_v)² / Σ w_v² is the effective number of inputs of row v (Kish). The factor k / (k + 1) shrinks the vector
    as one more input of zero would.

    Args:
        rows: `HeadSums.rows` of the whole text.
        fisher: (vocabulary,) Σ w_v |x|², the outputs of `HeadSums.moments`, not normalised.
    """
    _, weight, squares = rows.outputs
    effective = weight.square() / squares.clamp_min(1e-30)
    scale = effective / ((effective + 1.0) * weight * fisher).clamp_min(1e-30)
    return rows.inputs.mul_(scale.sqrt()[:, None])
