"""The head: gradients of sampled labels for the layers below, and the Fisher information of its rows.

The loss of a token is the cross entropy with one label drawn from the model's own prediction p. Its gradient in the
logits, p - onehot(label), has the second moment diag(p) - p pᵀ: the Fisher information of the prediction. The backward
sweep begins with this gradient (`predictions.py`).

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

from ciuic_cli.layerwise.logits import logit_tokens
from ciuic_cli.layerwise.operations.stable_bits import stable_bits
from ciuic_cli.passes.chunk_size import scratch_slices
from ciuic_cli.passes.fisher import Contexts
from ciuic_cli.process.threads import one_thread
from ciuic_cli.statistics import lower_half
from ciuic_cli.statistics.moments import Moments
from ciuic_cli.statistics.predictions import Predictions
from ciuic_cli.statistics.symmetric_product import add_weighted_product

WEIGHT_BYTES = 64 << 20
"""Most bytes of the weights w of tokens that are kept. Chosen: 680 tokens in bfloat16 with a vocabulary of 49,152."""
ROWS_AT_ONCE = 4096
"""Rows of the head whose sums are updated at a time, so that a product stays in a cache. Chosen, not tuned."""


def sequence_seed(seed: int, sequence: int) -> int:
    """Seed for the labels of one sequence, from its number in the text. It does not depend on the worker."""
    return (seed << 30) + sequence


def squared_slope(logits: torch.Tensor, output: torch.Tensor) -> torch.Tensor | None:
    """Squared derivative of each logit in the head's output, (t, vocabulary); None if they are the same tensor.

    logits, output: (1, t, vocabulary). The function between them must be element by element (a factor, a soft cap).
    """
    if logits is output:
        return None
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
        self._sums = torch.zeros(4, vocabulary, device=device)
        self.moments = Moments(torch.zeros(cols, cols, device=device), self._sums[3])
        self._rows = Moments(torch.zeros(vocabulary, cols, device=device), self._sums[:3], dtype=dtype)
        tokens = max(logit_tokens(vocabulary, dtype), WEIGHT_BYTES // (dtype.itemsize * vocabulary))
        self._weights = torch.empty(tokens, vocabulary, dtype=dtype, device=device)
        self._inputs = torch.empty(tokens, cols, dtype=dtype, device=device)
        self._kept = 0

    def add(
        self, x: torch.Tensor, logits: torch.Tensor, slope: torch.Tensor | None, draws: torch.Tensor
    ) -> torch.Tensor:
        """Add the tokens of a span.

        Args:
            x: (t, n) float32, the head's inputs.
            logits, slope, draws: see `Predictions`. Without slopes the gradient overwrites the logits, which no
                backward pass needs: they are the head's product.

        Returns:
            The gradient of sampled labels in the logits.
        """
        if self._kept + len(x) > len(self._weights):
            self._add_rows()
        kept = slice(self._kept, self._kept + len(x))
        squares = x.square().sum(1)
        predictions = Predictions(logits, slope, draws, squares)
        gradient, token_weights = predictions.add_to(self._sums, self._weights[kept], overwrite=slope is None)
        self._inputs[kept], self._kept = x, kept.stop
        self.moments.inputs.addmm_((x * token_weights[:, None]).T, x)
        with one_thread():
            self.moments.trace += float((token_weights * squares).sum())
        self.moments.tokens += len(x)
        return gradient

    def rows(self) -> Moments:
        """Inputs (vocabulary, n), Σ w_v x by row; outputs (3, vocabulary): Σ p_v, Σ w_v and Σ w_v²."""
        self._add_rows()
        return self._rows

    def _add_rows(self) -> None:
        """Add the products of the weights and inputs that are kept, a few thousand rows at a time."""
        weights, inputs = self._weights[: self._kept], self._inputs[: self._kept]
        with stable_bits(weights.device):
            for begin in range(0, weights.shape[1], ROWS_AT_ONCE):
                rows = slice(begin, begin + ROWS_AT_ONCE)
                if weights.dtype == torch.float32:
                    self._rows.inputs[rows].addmm_(weights[:, rows].T, inputs)
                else:  # torch adds a product only to a sum of the same dtype
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


def context_moment(contexts: Contexts, weights: torch.Tensor) -> torch.Tensor:
    """Σ weights_r v_r v_rᵀ over the context vectors v, (n, n) float32. weights: (m,) float32, none negative."""
    of_rows = (weights * contexts.row_factors.square())[:, None]
    moment = lower_half.zeros(contexts.vectors.shape[1], contexts.vectors.device)
    for part in scratch_slices(len(of_rows)):
        add_weighted_product(moment, contexts.vectors[part], of_rows[part])
    lower_half.mirror(moment)
    if contexts.column_factors is not None:
        moment.mul_(contexts.column_factors).mul_(contexts.column_factors[:, None])
    return moment
