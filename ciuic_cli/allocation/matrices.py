"""The matrices among which the budget is shared, and what an error in each of them costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ciuic_cli.checkpoint.model_map import Parameter
from ciuic_cli.checkpoint.roles import MTP_ROLES
from ciuic_cli.passes.quantize import BLOCK, KroneckerFisher, chunk_rows
from ciuic_cli.process.memory import matrix_bytes
from ciuic_cli.process.threads import one_thread
from ciuic_cli.statistics.files import Statistics
from ciuic_cli.statistics.moments import FULL_FISHER_LIMIT

UNIFORM_SHARE = 0.02
"""Share of the text that counts as tokens drawn uniformly from the vocabulary: the floor under rare tokens."""
TEMPER = 0.7
"""Exponent of a token's importance: other texts have other frequencies than the calibration text, above all of tokens
that are rare in it. (The same idea, with 0.75, draws word2vec's negative samples: Mikolov et al. 2013.)"""
EMBEDDING_ROLES = ("embedding", "head")
VOCABULARY_COPIES = 3
"""Float32 copies of a vocabulary that are held whole: itself, its contexts, and what is made of either."""
UNSEEN_ROLES = (*MTP_ROLES, "indexer")
"""Matrices without statistics, which no probe measures: predictions do not pass through multi-token-prediction layers,
and no gradient through an indexer's choice of tokens, which is of all of them where the text is as short as here."""
PLAIN_ROLES = (*EMBEDDING_ROLES, *UNSEEN_ROLES)
"""Matrices that lose no row and get no low-rank part: every token of a vocabulary may be wanted, and of others no
statistics say which rows or directions matter."""
CHANNEL_ROLES = ("down", "shared_expert_down")
"""Projections whose inputs are the channels of an MLP."""


@dataclass(frozen=True, slots=True)
class WeightMatrix:
    """One matrix of the budget: a 2-D parameter, or one expert of a stack."""

    name: str
    expert: int | None
    role: str
    rows: int
    cols: int

    @property
    def key(self) -> str:
        return self.name if self.expert is None else f"{self.name}[{self.expert}]"

    @property
    def padded_cols(self) -> int:
        return -(-self.cols // BLOCK) * BLOCK

    @property
    def groups(self) -> int:
        return -(-self.rows // BLOCK)

    @property
    def weights(self) -> int:
        return self.rows * self.cols


def full_outputs(role: str, rows: int) -> bool:
    """Whether G is kept in full: not for head and embedding, nor for very many outputs, nor without statistics."""
    return role not in PLAIN_ROLES and rows <= FULL_FISHER_LIMIT


def row_slices(matrix: WeightMatrix) -> list[slice]:
    """Its stored rows, those that are worked on together: of a vocabulary, which nothing ties to each other, some at a
    time."""
    size = chunk_rows(matrix.cols) if matrix.role in EMBEDDING_ROLES else matrix.rows
    return [slice(begin, min(begin + size, matrix.rows)) for begin in range(0, matrix.rows, size)]


def working_bytes(matrix: WeightMatrix) -> int:
    """The most bytes that preparing, probing or rounding the matrix takes."""
    full = full_outputs(matrix.role, matrix.rows)
    if matrix.role not in EMBEDDING_ROLES:
        return matrix_bytes(matrix.rows, matrix.cols, full_outputs=full)
    chunk = row_slices(matrix)[0].stop
    whole = 4 * VOCABULARY_COPIES * matrix.weights
    return whole + matrix_bytes(chunk, matrix.cols, full_outputs=full, contexts=True)


def weight_matrices(parameters: Iterable[Parameter]) -> list[WeightMatrix]:
    """Every compressible matrix, experts one by one, in the order of the model."""
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


@one_thread()
def fisher_of(matrix: WeightMatrix, statistics: Statistics) -> KroneckerFisher:
    """G and H of one matrix.

    A head's rows and an embedding's rows are mixed with the uniform share, and the differences between them
    tempered, so that tokens absent from the calibration text keep their weight. A tied matrix is charged for both
    of its uses.
    """
    h = statistics.input_moment(matrix.name, matrix.expert)
    g = statistics.output_fisher(matrix.name, matrix.expert)
    use = statistics.embedding_use(matrix.name)
    contexts = statistics.contexts(matrix.name)
    as_head = None if contexts is None or g is None else (1 - UNIFORM_SHARE) * g
    if g is not None and g.dim() == 1:
        g = (1 - UNIFORM_SHARE) * g + UNIFORM_SHARE * g.mean()
    if use is not None:
        frequency = (1 - UNIFORM_SHARE) * use.frequency + UNIFORM_SHARE / len(use.frequency)
        as_input = frequency * use.energy
        if h is None or g is None:
            h, g = use.moment, as_input
        else:
            both = (g.sum() + as_input.sum()).clamp_min(1e-30)
            h = (g.sum() * h + as_input.sum() * use.moment) / both
            g = g + as_input
    if h is None or g is None:  # not covered by the statistics; `level_uncovered` sets the scale
        h = torch.eye(matrix.cols) / matrix.cols
        g = torch.ones(matrix.rows)
    if contexts is not None and as_head is not None:
        # They hold for the head's share of what a row costs, and leave what all rows have in common.
        contexts *= (as_head / g.clamp_min(1e-30)).sqrt()[:, None]
        h = h - (contexts * (g / g.sum().clamp_min(1e-30))[:, None]).T @ contexts
    if matrix.role in EMBEDDING_ROLES and g.dim() == 1:
        g = tempered(g)
    return KroneckerFisher(h, g, contexts)


def tempered(importance: torch.Tensor) -> torch.Tensor:
    """Importances (m,) of tokens closer to each other, with the same sum."""
    powers = importance.clamp_min(0.0) ** TEMPER
    total = powers.sum()
    return powers * (importance.sum() / total) if bool(total > 0) else importance
