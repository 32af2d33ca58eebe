"""Factors for error feedback: block LDL factors of H and G, and a direction for each row of an embedding or head.

The moments are factored as H = L D Lᵀ and G = M C Mᵀ, in blocks of 16: L and M are unit block lower triangular, D and C
block diagonal. Rounding with feedback through L and M reduces the loss ½ tr(Eᵀ G E H) of the error E to
½ Σ_r C_rr |η_r|² tr(D) / n, where η_r is the error of the trellis code in row r.
Sources: LDLQ in QuIP# (Tseng et al. 2024); both sides in YAQA (Tseng et al. 2025).

Rows of an embedding or head may have moments H_r = H + v_r v_rᵀ: a token's logit matters only in contexts where the
token is likely, and those contexts are similar. No factorisation per row is needed: in the basis of L, v_r becomes
the direction z_r = L⁻¹ v_r. Rounding goes from the last block of columns to the first. Let d = Σ η_j · z_j be the error
of row r along z_r, summed over the blocks j that are rounded already. The best compensation adds to each later block j
d times its pull, D_j⁻¹ z_j / (1 + Σ_{i≤j} z_i · D_i⁻¹ z_i) (measured: docs/experiments/codes/row-feedback.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ciuic_cli.codecs.transform import TILE, transform
from ciuic_cli.passes.chunk_size import part_slices, scratch_slices, square_slices
from ciuic_cli.passes.column_order import rounding_order
from ciuic_cli.passes.linear_algebra import (
    damped_cholesky,
    inverse_lower,
    times_lower_transposed,
    transpose,
)
from ciuic_cli.process.threads import one_thread
from ciuic_cli.profiling.account import step

INPUT_DAMPING = 0.08
"""Added to H's diagonal, as a share of its mean (measured: docs/experiments/statistics/heavy-tails.md)."""
OUTPUT_DAMPING = 0.1
"""Added to G's diagonal, as a share of its mean, so that no output's error counts nothing (measured:
docs/experiments/statistics/damping.md)."""
_INPUT_FLOOR = 1e-12
_OUTPUT_FLOOR = 1e-30
"""Also added to the diagonals of H and of G, so that a moment of zeros factors (chosen, not tuned). G holds squared
gradients, which can be far smaller than inputs."""
_PADDING_DIAGONAL = 1e-3
"""Diagonal of the rows and columns that pad a moment, as a share of its mean diagonal: any positive value will do,
because they multiply zeros."""


@dataclass(frozen=True)
class BlockLDL:
    """A moment (n, n) factored as L D Lᵀ in blocks of 16.

    Attributes:
        factor: L, (n, n) float32 unit block lower triangular; None if the moment is diagonal or could not be factored.
        d_diagonal: (n,) float32 diagonal of D, by which the code's squared error counts if there is feedback.
        damping: share of the mean diagonal that had to be added, beyond the usual damping, before the moment factored;
            infinity if it never did.
        whitening: X, (n / 16, 16, 16) float32 with X_j D_j X_jᵀ = 1; None without a factor.
    """

    factor: torch.Tensor | None
    d_diagonal: torch.Tensor
    damping: float = 0.0
    whitening: torch.Tensor | None = None


def block_ldl(moment: torch.Tensor) -> BlockLDL:
    """Factor a symmetric moment (n, n), n a multiple of 16.

    A moment that is singular to working precision is damped (`damped_cholesky`); if it still does not factor, only its
    diagonal is used. Factors are computed in the moment's dtype. float32 suffices for H and G, whose usual damping
    leaves no small eigenvalues (measured: docs/experiments/statistics/faster-moments.md).
    """
    lower, damping = damped_cholesky(moment)
    if lower is None:
        return BlockLDL(None, moment.diagonal().clone(), damping)
    corners = lower.unfold(0, TILE, TILE).unfold(1, TILE, TILE).diagonal().permute(2, 0, 1)
    inverse = torch.linalg.inv(corners).float()
    d_diagonal = corners.square().sum(2).reshape(-1)  # D_j = R_j R_jᵀ for the diagonal block R_j of `lower`
    factor = lower.float()  # `lower` itself if that is float32
    for j, block in enumerate(inverse):
        columns = factor[j * TILE :, j * TILE : (j + 1) * TILE]
        columns.copy_(columns @ block)
    return BlockLDL(factor, d_diagonal.float(), damping, inverse)


class FactoredInputs(NamedTuple):
    """H factored for rounding, in the transformed basis.

    block_order: (n / 16,) int64, n padded to a multiple of 16; position i holds block block_order[i] of the columns.
    ldl: the factors of H with its blocks in that order.
    """

    block_order: torch.Tensor
    ldl: BlockLDL


def factor_inputs(moment: torch.Tensor, *, overwrite: bool = False) -> FactoredInputs:
    """Transform, damp, order and factor H (n, n) float32.

    overwrite: transform and order H in its own memory, if it need not be padded; then only the factor takes as much
    again.
    """
    with step("factors of H"):
        extra = -len(moment) % TILE
        copies = extra or not overwrite
        h = torch.nn.functional.pad(moment, (0, extra, 0, extra)) if copies else moment
        _transform_both_sides(h)
        damp(h)
        block_order = rounding_order(h)
        _reorder(h, block_order)
        return FactoredInputs(block_order, block_ldl(h))


def _transform_both_sides(moment: torch.Tensor) -> None:
    """T H Tᵀ for a symmetric H (n, n), n a multiple of 16, in place; symmetric but for rounding."""
    # Rows are transformed where they lie: H Tᵀ, whose transpose is T H, and then T H Tᵀ.
    for part in part_slices(moment):
        moment[part] = transform(moment[part])
    transpose(moment)
    for part in part_slices(moment):
        moment[part] = transform(moment[part])


def _reorder(moment: torch.Tensor, block_order: torch.Tensor) -> None:
    """Put the blocks of 16 rows and of 16 columns of a moment (n, n) into this order, in place."""
    for part in part_slices(moment):
        blocks = moment[part].unflatten(1, (-1, TILE))
        blocks.copy_(blocks.index_select(1, block_order))
    for columns in square_slices(moment):
        blocks = moment[:, columns].unflatten(0, (-1, TILE))
        blocks.copy_(blocks.index_select(0, block_order))


def damp(moment: torch.Tensor) -> None:
    """Add INPUT_DAMPING of its mean diagonal to H (n, n), in place."""
    with one_thread():
        mean = moment.diagonal().mean()
    moment.diagonal().add_(input_damping(mean))


def input_damping(mean: torch.Tensor) -> torch.Tensor:
    """What `damp` adds to a diagonal with this mean."""
    return INPUT_DAMPING * mean + _INPUT_FLOOR


def output_damping(mean: torch.Tensor) -> torch.Tensor:
    """What `factor_outputs` adds to a diagonal with this mean."""
    return OUTPUT_DAMPING * mean + _OUTPUT_FLOOR


def columns_of(block_order: torch.Tensor) -> torch.Tensor:
    """Column indices (n,) of blocks of 16 columns (n / 16,)."""
    return (block_order[:, None] * TILE + torch.arange(TILE, device=block_order.device)).reshape(-1)


def factor_outputs(moment: torch.Tensor, *, overwrite: bool = False) -> BlockLDL:
    """Damp, pad and factor G (m, m) float32; a diagonal (m,) is only padded.

    overwrite: a full G is damped in its own memory.
    """
    if moment.dim() == 1:
        return BlockLDL(None, torch.nn.functional.pad(moment, (0, -len(moment) % TILE)))
    with step("factors of G"):
        g = moment if overwrite else moment.clone()
        g.diagonal().add_(output_damping(g.diagonal().mean()))
        return block_ldl(pad_square(g))


def pad_square(moment: torch.Tensor) -> torch.Tensor:
    """Pad (n, n) to the next multiple of 16, with _PADDING_DIAGONAL so that it factors."""
    extra = -len(moment) % TILE
    if not extra:
        return moment
    padded = torch.nn.functional.pad(moment, (0, extra, 0, extra))
    padded.diagonal()[len(moment) :] = moment.diagonal().mean() * _PADDING_DIAGONAL
    return padded


@dataclass(frozen=True)
class RowFeedback:
    """Feedback of each row along one direction; the top of this file has the formulas.

    Attributes:
        direction: z, (m, n) float32.
        pull: (m, n) float32; a unit of error along z moves the row's later targets by this much.
        trace: (m,) float32, what the direction adds to tr(D) of its row.
    """

    direction: torch.Tensor
    pull: torch.Tensor
    trace: torch.Tensor


def factor_contexts(ldl: BlockLDL, contexts: torch.Tensor) -> RowFeedback | None:
    """The row feedback for contexts v (m, n) in the basis and column order of `ldl`; None if `ldl` has no factor.

    The result's direction takes the memory of `contexts`, which is overwritten.
    """
    if ldl.factor is None or ldl.whitening is None:
        return None
    pull, trace = torch.empty_like(contexts), contexts.new_empty(len(contexts))
    inverse = inverse_lower(ldl.factor)  # once, instead of solving for each part of a large embedding
    for rows in scratch_slices(len(contexts)):
        z = times_lower_transposed(contexts[rows], inverse)
        blocks = z.unfold(1, TILE, TILE).transpose(0, 1)  # (n / 16, rows, 16)
        white = blocks @ ldl.whitening.transpose(1, 2)
        power = white.square().sum(2).T  # (rows, n / 16): z_j · D_j⁻¹ z_j
        denominator = 1.0 + power.cumsum(1)
        pull[rows] = ((white @ ldl.whitening).transpose(0, 1) / denominator[:, :, None]).reshape(z.shape)
        trace[rows] = (blocks.square().sum(2).T / (denominator - power)).sum(1)
        contexts[rows] = z
    return RowFeedback(contexts, pull, trace)
