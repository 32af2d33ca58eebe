"""Kronecker-factored Fisher information of every weight matrix: H is summed up while a layer runs forward, G while it
runs backward.

Notation: a matrix W (m, n) has inputs x_t (n,) and output gradients g_t = d loss / d (W x_t) (m,) at token t. The loss
is the cross entropy with a label sampled from the model's own prediction (`collect.py`), so that the second moment of
the gradient of W is its Fisher information. That is approximated by a Kronecker product G ⊗ H, with which a weight
error E (m, n) is predicted to cost, in nats per token,

    KL ≈ ½ tr(Eᵀ G E H).

In the simplest form H = E[x xᵀ] and G = E[g gᵀ]. The code does the following, in this order.

1. Tokens are weighted. A few tokens have most of the squared gradient norm |x|² |g|², and in other text these are other
   tokens. So a token counts with its root: in G with |x_t| |g_t|, in H with |x_t| (measured:
   docs/experiments/statistics/heavy-tails.md). H needs no gradients: with |x_t| |g_t| it is no better on other text,
   and without them text that only runs forward adds to it (measured: docs/experiments/statistics/forward-only.md).

2. The weighted products are summed over tokens (`Moments.add_inputs` and `add_outputs`). For G this is one step of
   power iteration from the identity (Tseng et al., "Model-Preserving Adaptive Rounding", 2025) for tokens that are
   taken as independent:

       H ∝ Σ 1 / |x_t| x_t x_tᵀ           (n, n)
       G ∝ Σ |x_t| / |g_t| g_t g_tᵀ       (m, m)

   Products of different tokens are left out: they gain nothing on other text (measured:
   docs/experiments/statistics/token-pairs.md).

3. The weighted vectors are rounded to the dtype of the layer's products, bfloat16 on recent processors, and their
   products are summed in float32. The sum is that of other vectors, so it cannot become indefinite (measured:
   docs/experiments/statistics/rounded-inputs.md).

4. G of a matrix with more rows than columns is the sum over every fourth token (TALL_OUTPUT_STEP), scaled to the trace
   that the whole sum would have (`Moments.scale`). Experts have few tokens each, so they keep all.

5. `files.py` normalises the sums before it writes them. H gets unit trace. G is divided by the tokens that ran
   backward, and multiplied by Σ min(|x| |g|, c)² / Σ |x| |g|, because step 1 changed the sum of the squared gradient
   norms. Here c is OUTLIER_LIMIT times the mean of |x| |g|. In some layers one token of each sequence, usually the
   first, has nearly all of the sum; but its loss cannot grow with it (measured:
   docs/experiments/statistics/outlier-tokens.md).

6. Off-diagonal parts overfit if they are estimated from few tokens. Segments of the text show which share of their
   squared correlations is noise, and that share is left out (`noise_share`; measured:
   docs/experiments/statistics/few-tokens.md).

Two more corrections for too few tokens happen later: an expert's moments are shrunk towards the pool of its layer when
they are read (`files.py`), and both factors are damped before they are factorised (`passes/feedback.py`; measured:
docs/experiments/statistics/damping.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ciuic_cli.process.threads import one_thread
from ciuic_cli.statistics import lower_half
from ciuic_cli.statistics.spare_memory import SpareMemory
from ciuic_cli.statistics.symmetric_product import add_weighted_product

SMALLEST_ROOT = 1e-24
"""Tokens with a smaller |x| in H, or |x| |g| in G, are not counted, so that no weight overflows. Chosen."""
OUTLIER_LIMIT = 16.0
"""A token's |x| |g| counts as at most this many times the mean over all tokens when the loss of a matrix is predicted
(measured: docs/experiments/statistics/outlier-tokens.md)."""
TALL_OUTPUT_STEP = 4
"""Where a matrix has more rows than columns, G is summed over one of so many tokens: it takes most of the work, and
gains least (measured: docs/experiments/statistics/tall-matrices.md)."""


class Segment(NamedTuple):
    """A part of the text. tokens: how many. inputs, outputs: squared correlations of its sums for H and for G
    (`lower_half.squared_correlations`); 0 of diagonals."""

    tokens: int
    inputs: float
    outputs: float


def noise_share(total: float, parts: Sequence[tuple[int, float]]) -> float:
    """The share in [0, 1] of a moment's squared correlations that is noise; 0 if there is one part.

    With r² the sum of the true squared correlations, an estimate from t tokens has r² + c / t. So the parts and the
    whole text give c. Correlations are multiplied by 1 minus the result, (c / t) / (r² + c / t), which is the shrinkage
    with the least squared error. Source: Schäfer & Strimmer 2005, who estimate c from tokens that are independent.

    Args:
        total: squared correlations of the whole text.
        parts: tokens, and squared correlations, of each part of the text.
    """
    parts = [part for part in parts if part[1]]  # the others have no tokens, or only tokens without weight
    tokens, count = sum(tokens for tokens, _ in parts), len(parts)
    if count < 2 or total <= 0:
        return 0.0
    excess = sum(squares for _, squares in parts) - count * total
    noise = excess / (sum(tokens / each for each, _ in parts) - count)
    return min(max(noise / total, 0.0), 1.0)


@dataclass
class Moments:
    """Running sums of H or G of one matrix (m, n), or of both, not normalised.

    inputs: (n, n) float32, the sum for H, or its diagonal (n,). outputs: (m, m) float32, the sum for G, or its diagonal
    (m,). One of them is empty (0,) where only the other is summed. trace: of the full sum; of the head it is that of
    both. tokens: how many were added. roots: (tokens,) float32 on the CPU, |x| |g| of each token in a sum for G; empty
    where tokens are not weighted. halves: whether full sums have only their lower half
    (`lower_half.py`). segments: the parts of the text that the sums contain; empty if they were not noted. dtype: of
    products, see `symmetric_product`.
    """

    inputs: torch.Tensor
    outputs: torch.Tensor
    trace: float = 0.0
    tokens: int = 0
    roots: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    halves: bool = False
    segments: tuple[Segment, ...] = ()
    dtype: torch.dtype = torch.float32

    @classmethod
    def of_inputs(
        cls,
        cols: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        full: bool = True,
        spare: SpareMemory | None = None,
    ) -> Moments:
        """Zeros for H, in halves; a diagonal unless `full`. spare: memory for them."""
        return cls(_zeros(cols, device, full, spare), torch.empty(0), halves=True, dtype=dtype)

    @classmethod
    def of_outputs(
        cls,
        rows: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        full: bool = True,
        spare: SpareMemory | None = None,
    ) -> Moments:
        """Zeros for G, as `of_inputs`."""
        return cls(torch.empty(0), _zeros(rows, device, full, spare), halves=True, dtype=dtype)

    @property
    def header(self) -> tuple[float, int, torch.Tensor, bool, tuple[Segment, ...]]:
        """All fields between the two sums and `dtype`, in their order."""
        return self.trace, self.tokens, self.roots, self.halves, self.segments

    @property
    def energy_ratio(self) -> float:
        """Squared gradient norm of the tokens, outliers limited, over its weighted sum; 1 where that is 0."""
        with one_thread():
            roots = self.roots.double()
            weighted = float(roots.sum())
            if not weighted:
                return 1.0
            limit = OUTLIER_LIMIT * weighted / self._weighted_tokens
            return float(roots.clamp(max=limit).square().sum()) / weighted

    @property
    def _weighted_tokens(self) -> int:
        """Tokens with a weight: those of a sequence that does not count have none."""
        return int(self.roots.count_nonzero())

    def add_inputs(self, x: torch.Tensor, weight: float = 1.0) -> None:
        """Add tokens to the sum for H: inputs x (t, n), float32 or bfloat16. weight: of these tokens."""
        norms = vector_norms(x)
        tiny = norms < SMALLEST_ROOT
        self._add(self.inputs, x, (weight / norms).masked_fill(tiny, 0.0))
        with one_thread():
            self.trace += weight * float(norms.masked_fill(tiny, 0.0).sum())
        self.tokens += len(x)

    def add_outputs(self, g: torch.Tensor, input_norms: torch.Tensor, *, step: int = 1) -> None:
        """Add tokens to the sum for G: gradients g (t, m), float32 or bfloat16, and the norms (t, 1) of their inputs.

        step: the sum has one of so many tokens.
        """
        norms = vector_norms(g)
        roots = input_norms * norms
        tiny = roots < SMALLEST_ROOT
        roots.masked_fill_(tiny, 0.0)
        weights = (input_norms / norms).masked_fill(tiny, 0.0)
        # Not the first token of a sequence, which may be an outlier.
        chosen = slice(step - 1, None, step)
        self._add(self.outputs, g[chosen], weights[chosen])
        with one_thread():
            self.trace += float(roots.sum())
        self.roots = torch.cat((self.roots, roots.flatten().cpu()))
        self.tokens += len(g)

    def note_segment(self) -> None:
        """Note that these are the sums of one segment of the text."""
        self.segments = (Segment(self.tokens, *self._squared_correlations()),)

    def include(self, other: Moments) -> None:
        """Add the sums of other tokens."""
        for total, more in ((self.inputs, other.inputs), (self.outputs, other.outputs)):
            if self._is_half(total):
                lower_half.add(total, more)
            else:
                total += more
        self.trace += other.trace
        self.tokens += other.tokens
        self.roots = torch.cat((self.roots, other.roots))
        self.segments += other.segments

    def scale(self, inputs: float, outputs: float) -> None:
        """Multiply each of the two sums by a number. Before, a full sum for G gets the trace that it has with all
        tokens, and off-diagonal parts are shrunk if segments were noted."""
        if self.outputs.dim() == 2 and (found := float(self.outputs.diagonal().sum(dtype=torch.float64))) > 0:
            outputs *= self.trace / found
        kept = [1.0, 1.0]
        if self.segments:
            of_inputs, of_outputs = self._squared_correlations()
            kept[0] -= noise_share(of_inputs, [(segment.tokens, segment.inputs) for segment in self.segments])
            kept[1] -= noise_share(
                of_outputs, [(segment.tokens, segment.outputs) for segment in self.segments]
            )
        self._scale(self.inputs, inputs, kept[0])
        self._scale(self.outputs, outputs, kept[1])

    def _squared_correlations(self) -> tuple[float, float]:
        """Of H and of G; 0 of diagonals."""
        squares = [
            lower_half.squared_correlations(total) if total.dim() == 2 else 0.0
            for total in (self.inputs, self.outputs)
        ]
        return squares[0], squares[1]

    def _is_half(self, total: torch.Tensor) -> bool:
        return self.halves and total.dim() == 2

    def _scale(self, total: torch.Tensor, factor: float, kept: float) -> None:
        """Multiply a sum by `factor`, and its off-diagonal part, if it has one, by `kept` besides."""
        if total.dim() == 1:
            total *= factor
            return
        diagonal = total.diagonal() * factor
        if self.halves:
            lower_half.scale(total, factor * kept)
        else:
            total *= factor * kept
        total.diagonal().copy_(diagonal)

    def _add(self, total: torch.Tensor, vectors: torch.Tensor, weights: torch.Tensor) -> None:
        """Add the products of vectors (t, n) with themselves, times weights (t, 1), or their diagonal."""
        if total.dim() == 1:
            total += (vectors.float().square() * weights).sum(0)
        else:
            add_weighted_product(total, vectors, weights, self.dtype, rounded=True)


def vector_norms(vectors: torch.Tensor) -> torch.Tensor:
    """Norms of the rows (t, 1), float32."""
    return torch.linalg.vector_norm(vectors, dim=-1, keepdim=True, dtype=torch.float32)


def _zeros(size: int, device: torch.device, full: bool, spare: SpareMemory | None) -> torch.Tensor:
    return (spare or SpareMemory()).zeros((size, size) if full else (size,), device)
