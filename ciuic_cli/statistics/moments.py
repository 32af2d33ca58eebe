"""Kronecker-factored Fisher information of every weight matrix, summed up while a layer runs backward.

Notation: a matrix W (m, n) has inputs x_t (n,) and output gradients g_t = d loss / d (W x_t) (m,) at token t. The loss
is the cross entropy with a label sampled from the model's own prediction (`collect.py`), so that the second moment of
the gradient of W is its Fisher information. That is approximated by a Kronecker product G ⊗ H, with which a weight
error E (m, n) is predicted to cost, in nats per token,

    KL ≈ ½ tr(Eᵀ G E H).

In the simplest form H = E[x xᵀ] and G = E[g gᵀ]. The code does the following, in this order.

1. Tokens are weighted (`Moments._token_weights`). A few tokens have most of the squared gradient norm
   |x|² |g|², and in other text these are other tokens. So every g_t is divided by (|x_t| |g_t|)^½. A token then
   counts with |x_t| |g_t|, the root (measured: docs/experiments/statistics/heavy-tails.md).

2. Products are summed over pairs of tokens s, t of one sequence (`Moments.add_sequences`), one step of power iteration
   from the identity (Tseng et al., "Model-Preserving Adaptive Rounding", 2025):

       H ∝ Σ w_st (g_s · g_t) x_s x_tᵀ        (n, n)
       G ∝ Σ w_st (x_s · x_t) g_s g_tᵀ        (m, m)

   with w_st = 1 for s = t and `PAIR_WEIGHT` for s ≠ t. Pairs matter because W has the same error at every token: the
   errors of two outputs with similar inputs add up. The inputs in H are weighted by gradients, and the gradients in G
   by inputs. Without these weights, attention sinks would dominate H: their activations are huge, but hardly any
   gradient reaches them.

   The tokens of an expert, or of a product that pools tokens, are not a sequence. There only s = t counts
   (`Moments.add_tokens`).

3. The pair sums can be computed in two equivalent ways: from (t, t) products of tokens, or from gradients (m, n) of W.
   The cheaper one is taken (`pair_sum_work`). The weights of pairs, and the products of G, are rounded to the dtype of
   the layer's products, bfloat16 on recent processors. The products of H are float32. Neither makes a moment
   indefinite: a token's own product counts 1, its pairs `PAIR_WEIGHT`, so the weights are far from singular; and G is
   shrunk and damped (measured: docs/experiments/statistics/faster-moments.md).

4. G of a matrix with more rows than columns is the sum over every fourth part of the sequences (TALL_OUTPUT_PARTS),
   scaled to the trace that the whole sum would have, which is that of H (`Moments.scale`).

5. `files.py` normalises the sums before it writes them. H gets unit trace. G is divided by the tokens of the text, and
   multiplied by Σ min(|x| |g|, c)² / Σ |x| |g|, because step 1 changed the sum of the squared gradient norms. Here c is
   OUTLIER_LIMIT times the mean of |x| |g|. In some layers one token of each sequence, usually the first, has nearly all
   of the sum; but its loss cannot grow with it (measured: docs/experiments/statistics/outlier-tokens.md).

6. G's off-diagonal part overfits if it is estimated from few tokens. So it is multiplied by t / (t + 10 m), with t
   tokens in its sum (PRIOR_TOKENS_PER_OUTPUT; measured: docs/experiments/statistics/damping.md).

Two more corrections for too few tokens happen later: an expert's moments are shrunk towards the pool of its layer when
they are read (`files.py`), and both factors are damped before they are factorised (`passes/feedback.py`; measured:
docs/experiments/statistics/damping.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ciuic_cli.process.threads import one_thread
from ciuic_cli.statistics import lower_half
from ciuic_cli.statistics.spare_memory import SpareMemory
from ciuic_cli.statistics.symmetric_product import (
    add_symmetric_product,
    add_weighted_product,
    row_products,
    symmetric_product,
)

PAIR_WEIGHT = 0.25
"""Weight w_st of a pair of different tokens of a sequence. 1 would be unbiased, but is noisy with few sequences.
Measured: docs/experiments/statistics/token-pairs.md."""
SMALLEST_ROOT = 1e-24
"""Tokens with a smaller |x| |g| are not counted, so that no weight or product of weights overflows. Chosen."""
PAIR_TOKENS = 32
"""Most tokens among which pairs are counted; longer sequences are cut into parts. The work on pairs grows with the
length of a part (measured: docs/experiments/statistics/token-pairs.md)."""
OUTLIER_LIMIT = 16.0
"""A token's |x| |g| counts as at most this many times the mean over all tokens when the loss of a matrix is predicted
(measured: docs/experiments/statistics/outlier-tokens.md)."""
PRIOR_TOKENS_PER_OUTPUT = 10.0
"""Tokens per output for which a diagonal G counts when the sum for G is shrunk towards its own diagonal (measured:
docs/experiments/statistics/damping.md)."""
TALL_OUTPUT_PARTS = 4
"""Where a matrix has more rows than columns, G is summed over one of so many parts of a text's sequences: it takes most
of the work, and gains least (measured: docs/experiments/statistics/tall-matrices.md)."""


@dataclass
class Moments:
    """Running sums of H and G of one matrix (m, n), not normalised.

    inputs: (n, n) float32, the sum for H, or its diagonal (n,). outputs: (m, m) float32, the sum for G, or its diagonal
    (m,). trace: of the full sum, equal for both. tokens: how many were added. roots: (tokens,) float32 on the CPU,
    |x| |g| of each token; empty where tokens are not weighted. halves: whether full sums have only their lower half
    (`lower_half.py`). dtype: of products, see `symmetric_product`.
    """

    inputs: torch.Tensor
    outputs: torch.Tensor
    trace: float = 0.0
    tokens: int = 0
    roots: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    halves: bool = False
    dtype: torch.dtype = torch.float32

    @classmethod
    def zeros(
        cls,
        rows: int,
        cols: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        full_inputs: bool = True,
        full_outputs: bool,
        spare: SpareMemory | None = None,
    ) -> Moments:
        """Empty sums, in halves; without full_inputs or full_outputs, diagonals. spare: memory for them."""
        zeros = (spare or SpareMemory()).zeros
        inputs = zeros((cols, cols) if full_inputs else (cols,), device)
        outputs = zeros((rows, rows) if full_outputs else (rows,), device)
        return cls(inputs, outputs, halves=True, dtype=dtype)

    @property
    def header(self) -> tuple[float, int, torch.Tensor, bool]:
        """All fields between the two sums and `dtype`, in their order."""
        return self.trace, self.tokens, self.roots, self.halves

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

    def add_tokens(self, x: torch.Tensor, g: torch.Tensor) -> None:
        """Add tokens without pairs: inputs x (t, n) and gradients g (t, m), float32 or bfloat16."""
        self._add_single_tokens(x, self._weighted_gradients(x, g))
        self.tokens += x.shape[0]

    def add_sequences(self, x: torch.Tensor, g: torch.Tensor, numbers: Sequence[int] = ()) -> None:
        """Add sequences with their pairs of tokens: inputs x (s, t, n) and gradients g (s, t, m), of either dtype.

        numbers: (s,) where each of them is a part of a longer one, the number of the part.
        """
        by_tokens, by_gradients = pair_sum_work(x.shape[1], g.shape[2], x.shape[2])
        if by_tokens < by_gradients or self._has_tall_outputs:
            self._add_token_pairs(x, g, numbers)
        else:
            g = self._weighted_gradients(x, g)
            self._add_weight_gradients(x, g)
            self._add_single_tokens(x.flatten(0, 1), g.flatten(0, 1), 1 - PAIR_WEIGHT)
        self.tokens += x.shape[0] * x.shape[1]

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

    def scale(self, inputs: float, outputs: float) -> None:
        """Multiply each of the two sums by a number. Before, a sum for G that lacks some parts is completed, and its
        off-diagonal part is shrunk."""
        tokens = float(self._weighted_tokens)
        if self._has_tall_outputs and (found := float(self.outputs.diagonal().sum(dtype=torch.float64))) > 0:
            outputs *= self.trace / found
            tokens *= found / self.trace
        self._scale(self.inputs, inputs)
        if self.outputs.dim() == 1:
            self._scale(self.outputs, outputs)
            return
        diagonal = self.outputs.diagonal() * outputs
        self._scale(self.outputs, outputs * tokens / (tokens + PRIOR_TOKENS_PER_OUTPUT * len(self.outputs)))
        self.outputs.diagonal().copy_(diagonal)

    @property
    def _has_tall_outputs(self) -> bool:
        """True if the sum for G is full, and the matrix has more rows than columns."""
        return self.outputs.dim() == 2 and len(self.outputs) > self.inputs.shape[-1]

    def _is_half(self, total: torch.Tensor) -> bool:
        return self.halves and total.dim() == 2

    def _scale(self, total: torch.Tensor, factor: float) -> None:
        if self._is_half(total):
            lower_half.scale(total, factor)
        else:
            total *= factor

    def _weighted_gradients(self, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        """g / (|x| |g|)^½ (.., m), float32: a token's |x|² |g|² becomes its root."""
        return g * self._token_weights(_norms(x) * _norms(g))

    def _token_weights(self, root: torch.Tensor) -> torch.Tensor:
        """|x| |g| of tokens to the power of -½, and 0 where that is nearly 0. Adds them to `roots`."""
        self.roots = torch.cat((self.roots, root.flatten().cpu()))
        return root.rsqrt().masked_fill(root < SMALLEST_ROOT, 0.0)

    def _add_token_pairs(self, x: torch.Tensor, g: torch.Tensor, numbers: Sequence[int] = ()) -> None:
        """All pairs by `PAIR_WEIGHT`, and single tokens, from the (s, t, t) products of tokens with each other.

        The products of the gradients are weighted here, and not the gradients themselves, which are more numbers.
        """
        rounded_g = g.to(self.dtype)
        x_products, g_products = (self._token_products(each) for each in (x.to(self.dtype), rounded_g))
        energy = x_products.diagonal(dim1=-2, dim2=-1) * g_products.diagonal(dim1=-2, dim2=-1)
        weights = self._token_weights(energy.sqrt())
        weights = weights[..., None] * weights[..., None, :]
        g_products *= weights
        _weight_pairs(x_products)
        with one_thread():
            self.trace += float((x_products * g_products).sum())
        x_products *= weights
        if self._has_tall_outputs and numbers:
            chosen = [place for place, number in enumerate(numbers) if number % TALL_OUTPUT_PARTS == 0]
            rounded_g, x_products = rounded_g[chosen], x_products[chosen]
        if len(rounded_g):
            self._sum_pairs(self.outputs, rounded_g, x_products, rounded=True)
        self._sum_pairs(self.inputs, x, _weight_pairs(g_products), rounded=False)

    def _token_products(self, vectors: torch.Tensor) -> torch.Tensor:
        """(s, t, t) float32 products of the tokens of each sequence, rounded to `dtype`; vectors (s, t, n)."""
        columns = vectors.mT
        return symmetric_product(columns, columns, self.dtype, rounded=True)

    def _add_weight_gradients(self, x: torch.Tensor, g: torch.Tensor) -> None:
        """All pairs, those with s = t included, by `PAIR_WEIGHT`, from the gradients (s, m, n) of the weight."""
        gradient = row_products(g.mT, PAIR_WEIGHT**0.5 * x.float().mT)
        with one_thread():
            self.trace += float(gradient.square().sum())
        self._sum_inputs(gradient.flatten(0, 1))
        self._sum_outputs(gradient.mT.flatten(0, 1))

    def _add_single_tokens(self, x: torch.Tensor, g: torch.Tensor, share: float = 1.0) -> None:
        """The pairs with s = t, times `share`: x (t, n) and g (t, m)."""
        x_norm, g_norm = _norms(x), _norms(g)
        self._sum_inputs(x * (share**0.5 * g_norm))
        self._sum_outputs(g * (share**0.5 * x_norm))
        with one_thread():
            self.trace += share * float((x_norm * g_norm).square().sum())

    def _sum_inputs(self, vectors: torch.Tensor) -> None:
        """Add vectorsᵀ vectors (t, n), or its diagonal, to `inputs`.

        With products of float32: H may have one large direction.
        """
        self._sum(self.inputs, vectors, rounded=False)

    def _sum_outputs(self, vectors: torch.Tensor) -> None:
        """As `_sum_inputs` to `outputs`, (t, m), with rounded products: before it is used, G is shrunk and damped by
        far more than they are off (`passes/feedback.py`)."""
        self._sum(self.outputs, vectors, rounded=True)

    def _sum_pairs(
        self, moment: torch.Tensor, vectors: torch.Tensor, weights: torch.Tensor, *, rounded: bool
    ) -> None:
        """Add the products of the vectors (s, t, n) of each sequence, times the weights (s, t, t), or its diagonal."""
        if moment.dim() == 1:
            moment += ((weights @ vectors.float()) * vectors).sum((0, 1))
        else:
            add_weighted_product(moment, vectors, weights, self.dtype, rounded=rounded)

    def _sum(self, moment: torch.Tensor, vectors: torch.Tensor, *, rounded: bool) -> None:
        if moment.dim() == 1:
            moment += vectors.square().sum(0)
        else:
            add_symmetric_product(moment, vectors, vectors, self.dtype, rounded=rounded)


def _norms(vectors: torch.Tensor) -> torch.Tensor:
    """Norms of the rows (.., 1), float32."""
    return torch.linalg.vector_norm(vectors, dim=-1, keepdim=True, dtype=torch.float32)


def pair_sum_work(length: int, rows: int, cols: int) -> tuple[int, int]:
    """Multiplications for the pair sums of one sequence: over pairs of tokens, and by the gradient of the weight.

    Both lead to the same sums. Work that both share (single tokens) is not counted. Symmetric products count as if all
    of them were computed, and H and G as full matrices.
    """
    # The (t, t) products of the inputs and their product with the gradients, and the same the other way round.
    by_tokens = 2 * length * length * (rows + cols)
    by_gradients = length * rows * cols + rows * cols * (rows + cols)
    return by_tokens, by_gradients


def _weight_pairs(products: torch.Tensor) -> torch.Tensor:
    """Multiply the products (s, t, t) of different tokens by `PAIR_WEIGHT`, in place."""
    single = products.diagonal(dim1=-2, dim2=-1).clone()
    products.mul_(PAIR_WEIGHT).diagonal(dim1=-2, dim2=-1).copy_(single)
    return products
