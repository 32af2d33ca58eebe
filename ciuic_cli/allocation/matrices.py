"""The weight matrices that share the budget, and the Fisher information of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ciuic_cli.checkpoint.model_map import Parameter
from ciuic_cli.checkpoint.roles import MTP_ROLES
from ciuic_cli.codecs.transform import TILE, padded
from ciuic_cli.integers import ceil_div
from ciuic_cli.passes.chunk_size import chunk_rows
from ciuic_cli.passes.fisher import Contexts, KroneckerFisher
from ciuic_cli.process.memory import PARALLEL_WORK_BYTES, matrix_bytes
from ciuic_cli.process.threads import one_thread
from ciuic_cli.statistics.files import Statistics
from ciuic_cli.statistics.head_fisher import context_moment
from ciuic_cli.statistics.recorder import records_full_outputs

UNIFORM_SHARE = 0.02
"""Share of a uniform distribution that is mixed into the token frequencies, so that rare tokens count a little
(measured: docs/experiments/allocation/token-weights.md)."""
TOKEN_WEIGHT_EXPONENT = 0.7
"""Exponent of a token's weight, its Fisher information: other text has other token frequencies than the calibration
text, above all of rare tokens (measured: docs/experiments/allocation/token-weights.md). word2vec (Mikolov et al. 2013)
draws negative samples with 0.75."""
EMBEDDING_ROLES = ("embedding", "head")
"""Matrices whose rows are tokens."""
EMBEDDING_WEIGHT_BYTES = 4 + 2
"""Bytes per weight of an embedding or head that are held whole: the matrix in float32, over which a probe writes its
result, and the contexts in bfloat16 (measured: docs/experiments/scale/large-matrices.md)."""
_TINY = 1e-30
"""Floor of divisors that are sums of Fisher information: without any, shares become 0 instead of NaN (chosen, not
tuned)."""
UNPROBED_ROLES = (*MTP_ROLES, "indexer")
"""Matrices without statistics, which probes do not perturb. The model's predictions do not depend on
multi-token-prediction layers. An indexer chooses tokens, through which no gradient flows; in sequences as short as the
calibration's it chooses all of them."""
UNPRUNED_ROLES = (*EMBEDDING_ROLES, *UNPROBED_ROLES)
"""Matrices that are never pruned and get no low-rank part. Any token of an embedding or head may occur; of the other
matrices no statistics say which rows or directions matter."""
CHANNEL_ROLES = ("down", "shared_expert_down")
"""Projections whose inputs are the channels of an MLP."""


@dataclass(frozen=True, slots=True)
class WeightMatrix:
    """One matrix that gets a share of the budget: a 2-D parameter, or one expert of a stack."""

    name: str
    expert: int | None
    role: str
    rows: int
    cols: int

    @property
    def key(self) -> str:
        """The parameter's name, with the expert's number in brackets: "mlp.experts.down_proj[3]"."""
        return self.name if self.expert is None else f"{self.name}[{self.expert}]"

    @property
    def padded_cols(self) -> int:
        return padded(self.cols)

    @property
    def groups(self) -> int:
        """Number of groups of 16 rows; the last group may have fewer."""
        return ceil_div(self.rows, TILE)

    @property
    def weights(self) -> int:
        return self.rows * self.cols


def full_outputs(role: str, rows: int, cols: int, *, tall_outputs: bool = True) -> bool:
    """Whether G is a full matrix. It is diagonal for embeddings and heads, for very many outputs, and without
    statistics.

    tall_outputs: whether it is full where a matrix that is no expert has more rows than columns.
    """
    tall = tall_outputs or role.startswith("expert")
    return role not in UNPRUNED_ROLES and records_full_outputs(rows, cols, tall=tall)


def row_slices(matrix: WeightMatrix) -> list[slice]:
    """The row chunks of a matrix as slices of its stored rows: several for an embedding or head, one for the others."""
    size = chunk_rows(matrix.cols) if matrix.role in EMBEDDING_ROLES else matrix.rows
    return [slice(begin, min(begin + size, matrix.rows)) for begin in range(0, matrix.rows, size)]


def working_bytes(matrix: WeightMatrix) -> int:
    """Peak bytes of preparing, probing or rounding the matrix."""
    whole = EMBEDDING_WEIGHT_BYTES * matrix.weights if matrix.role in EMBEDDING_ROLES else 0
    return whole + chunk_bytes(matrix)


def chunk_bytes(matrix: WeightMatrix) -> int:
    """As `working_bytes`, but of one row chunk, without what all chunks share."""
    full = full_outputs(matrix.role, matrix.rows, matrix.cols)
    contexts = matrix.role in EMBEDDING_ROLES
    return matrix_bytes(row_slices(matrix)[0].stop, matrix.cols, full_outputs=full, contexts=contexts)


def is_large(matrix: WeightMatrix) -> bool:
    """Whether a processor works on the matrix alone, because it takes much memory."""
    return working_bytes(matrix) > PARALLEL_WORK_BYTES


def weight_matrices(parameters: Iterable[Parameter]) -> list[WeightMatrix]:
    """Every compressible matrix in the order of the model, a stack of experts as one matrix per expert."""
    matrices = []
    for parameter in parameters:
        if not parameter.compress or parameter.tied_to:
            continue
        if len(parameter.shape) == 3:
            count, rows, cols = parameter.shape
            matrices += [WeightMatrix(parameter.name, e, parameter.role, rows, cols) for e in range(count)]
        else:
            rows, cols = parameter.shape
            matrices.append(WeightMatrix(parameter.name, None, parameter.role, rows, cols))
    return matrices


def fisher_of(matrix: WeightMatrix, statistics: Statistics) -> KroneckerFisher:
    """H and G of one matrix.

    Rows of an embedding or head are tokens: UNIFORM_SHARE is mixed into their frequencies, and their weights are raised
    to TOKEN_WEIGHT_EXPONENT, so that tokens absent from the calibration text count a little. The loss of a tied matrix
    is the sum of the losses of both of its uses. Without statistics H and G are multiples of the identity, and
    `arms.rescale_uncovered` sets the scale of the losses.
    """
    h, g, contexts = _moments_of(matrix, statistics)
    if contexts is not None:
        # Only the head's share of a row's loss depends on contexts. The mean of v vᵀ over the rows is subtracted from
        # H, so that the mean of H + v vᵀ is the H of the statistics.
        with one_thread():
            weights = g / g.sum().clamp_min(_TINY)
        h = h - context_moment(contexts, weights)
    if matrix.role in EMBEDDING_ROLES and g.dim() == 1:
        g = tempered(g)
    return KroneckerFisher(h, g, contexts)


@one_thread()
def _moments_of(
    matrix: WeightMatrix, statistics: Statistics
) -> tuple[torch.Tensor, torch.Tensor, Contexts | None]:
    """H and G of both uses of a matrix, token weights not raised to a power; and the contexts of a head's rows."""
    h = statistics.input_moment(matrix.name, matrix.expert)
    g = statistics.output_fisher(matrix.name, matrix.expert)
    use = statistics.embedding_use(matrix.name)
    vectors, contexts = statistics.contexts(matrix.name), None
    as_head = None if vectors is None or g is None else (1 - UNIFORM_SHARE) * g
    if g is not None and g.dim() == 1:
        g = (1 - UNIFORM_SHARE) * g + UNIFORM_SHARE * g.mean()
    if use is not None:
        frequency = (1 - UNIFORM_SHARE) * use.frequency + UNIFORM_SHARE / len(use.frequency)
        as_embedding = frequency * use.token_fisher
        if h is None or g is None:
            h, g = use.moment, as_embedding
        else:
            total = (g.sum() + as_embedding.sum()).clamp_min(_TINY)
            h = (g.sum() * h + as_embedding.sum() * use.moment) / total
            g = g + as_embedding
    if h is None or g is None:
        h = torch.eye(matrix.cols) / matrix.cols
        g = torch.ones(matrix.rows)
    if vectors is not None and as_head is not None:
        contexts = Contexts(vectors, (as_head / g.clamp_min(_TINY)).sqrt())
    return h, g, contexts


@one_thread()
def tempered(weights: torch.Tensor) -> torch.Tensor:
    """Token weights (m,) raised to TOKEN_WEIGHT_EXPONENT and rescaled to the same sum."""
    powers = weights.clamp_min(0.0) ** TOKEN_WEIGHT_EXPONENT
    total = powers.sum()
    return powers * (weights.sum() / total) if bool(total > 0) else weights
