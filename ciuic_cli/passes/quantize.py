"""The bits pass: what rounding a matrix will cost at each width, and the rounding itself.

An error E in a matrix W (m outputs, n inputs) costs KL ≈ ½ tr(Eᵀ G E H) per token. In the transformed basis (random
signs and a block Hadamard on the inputs) H becomes H' = T H Tᵀ. With the block factorisations H' = L D Lᵀ and
G = M C Mᵀ (unit lower triangular in blocks of 16; D, C block diagonal) error feedback along inputs and outputs
leaves ½ Σ_r C_rr |η_r|² tr(D) / n, where η_r is what the trellis code itself leaves in row r: its variance is the
row's (`unevenness.py`), times the code's normalised error at K bits. (LDLQ: QuIP#, Tseng et al. 2024; both sides:
YAQA, 2025.)

A row may have an H of its own: a token's logit matters only in contexts where the token is likely, and these are alike.
H_r = H + v_r v_rᵀ costs no factorisation per row: in the basis of L the second term is one direction z_r = L⁻¹ v_r, and
what the error η has collected along it, d = Σ η_j · z_j, is best undone by moving every later block j of the row by
D_j⁻¹ z_j d / (1 + Σ_{i≤j} z_i · D_i⁻¹ z_i).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from ciuic_cli.codecs.packing import PackedMatrix, bits_of, tile_nbytes
from ciuic_cli.codecs.rate_distortion import MSE_BY_L, SCALE_BY_L
from ciuic_cli.codecs.scales import decode_scales, encode_scales
from ciuic_cli.codecs.transform import block_width, transform
from ciuic_cli.codecs.trellis import round_matrix
from ciuic_cli.passes.linear_algebra import damped_cholesky, solve_lower
from ciuic_cli.passes.ordering import rounding_order
from ciuic_cli.passes.unevenness import even_square
from ciuic_cli.process.threads import one_thread

BLOCK = 16
ROWS_AT_ONCE = 4096
"""Of a vocabulary: what has to be held besides."""
CHUNK_BYTES = 1 << 25
"""Of a vocabulary in float32: about what is worked on at a time where nothing ties the rows to each other."""
INPUT_DAMPING = 0.08
"""Added to H's diagonal, as a share of its mean."""
OUTPUT_SHRINKAGE = 0.5
"""Share by which G's off-diagonal part is shrunk: it is estimated from few tokens and overfits."""
OUTPUT_DAMPING = 0.1
"""Added to G's diagonal, as a share of its mean: no output counts as entirely free."""


def chunk_rows(cols: int) -> int:
    """Rows that are worked on at a time: few enough for memory, and enough to keep the products large."""
    return max(1, CHUNK_BYTES // (4 * cols * ROWS_AT_ONCE)) * ROWS_AT_ONCE


@dataclass(frozen=True)
class KroneckerFisher:
    """What an error in a matrix costs per token. inputs: H (n, n) float32; outputs: G (m, m), or its diagonal (m,).

    contexts: (m, n) float32 v, where the rows differ in their inputs: row r has H + v_r v_rᵀ.
    """

    inputs: torch.Tensor
    outputs: torch.Tensor
    contexts: torch.Tensor | None = None

    def reordered(self, order: torch.Tensor) -> KroneckerFisher:
        """Of the matrix whose rows are these rows (m,) of the other."""
        outputs = self.outputs[order]
        contexts = None if self.contexts is None else self.contexts[order]
        return KroneckerFisher(self.inputs, outputs if outputs.dim() == 1 else outputs[:, order], contexts)


@dataclass(frozen=True)
class Feedback:
    """One side's error feedback. factor: (n, n) unit block lower triangular, None when there is none to
    feed back; noise: (n,) diagonal of D, the weight that the code's noise keeps; damping: what had to be added to
    the diagonal until the moment factored, as a share of its mean; infinite where it never did; whitening:
    (n / 16, 16, 16) X with X D Xᵀ = 1."""

    factor: torch.Tensor | None
    noise: torch.Tensor
    damping: float = 0.0
    whitening: torch.Tensor | None = None


def block_ldl(moment: torch.Tensor) -> Feedback:
    """H = L D Lᵀ with unit lower triangular L and block diagonal D, in blocks of 16.

    A moment that is singular to working precision is damped tenfold until it factors (at most to its
    mean diagonal); then only its diagonal is used.
    """
    lower, damping = damped_cholesky(moment.double())
    if lower is None:
        return Feedback(None, moment.diagonal().clone(), damping)
    blocks = lower.unfold(0, BLOCK, BLOCK).unfold(1, BLOCK, BLOCK).diagonal().permute(2, 0, 1)
    inverse = torch.linalg.inv(blocks).float()
    factor = lower.float()
    for j, block in enumerate(inverse):
        columns = factor[j * BLOCK :, j * BLOCK : (j + 1) * BLOCK]
        columns.copy_(columns @ block)
    noise = blocks.square().sum(2).reshape(-1)  # diagonal of C_jj C_jjᵀ
    return Feedback(factor, noise.float(), damping, inverse)


@dataclass(frozen=True)
class RowFeedback:
    """Feedback of each row along a direction of its own. direction: (m, n) z; pull: (m, n) what a unit of error that a
    row has collected along it moves each of its later targets by; noise: (m,) what it adds to tr(D)."""

    direction: torch.Tensor
    pull: torch.Tensor
    noise: torch.Tensor


def row_feedback(inputs: Feedback, contexts: torch.Tensor) -> RowFeedback | None:
    """For contexts v (m, n), in the basis of the inputs' feedback; None where that has no factor.

    They become the direction, in their own memory.
    """
    if inputs.factor is None or inputs.whitening is None:
        return None
    pull, noise = torch.empty_like(contexts), torch.empty(len(contexts))
    for begin in range(0, len(contexts), ROWS_AT_ONCE):
        rows = slice(begin, begin + ROWS_AT_ONCE)
        z = solve_lower(inputs.factor, contexts[rows].T).T.contiguous()
        blocks = z.unfold(1, BLOCK, BLOCK).transpose(0, 1)  # (n / 16, rows, 16)
        white = blocks @ inputs.whitening.transpose(1, 2)
        power = white.square().sum(2).T  # (rows, n / 16): z_j · D_j⁻¹ z_j
        room = 1.0 + power.cumsum(1)
        pull[rows] = ((white @ inputs.whitening).transpose(0, 1) / room[:, :, None]).reshape(z.shape)
        noise[rows] = (blocks.square().sum(2).T / (room - power)).sum(1)
        contexts[rows] = z
    return RowFeedback(contexts, pull, noise)


def pad_square(moment: torch.Tensor) -> torch.Tensor:
    """(n, n) to the next multiple of 16; the padding gets a tiny diagonal: it multiplies zeros."""
    extra = -len(moment) % BLOCK
    if not extra:
        return moment
    padded = torch.nn.functional.pad(moment, (0, extra, 0, extra))
    padded.diagonal()[len(moment) :] = moment.diagonal().mean() * 1e-3
    return padded


@dataclass(frozen=True)
class Prepared:
    """A matrix ready to be rounded.

    weight: (m16, n16) float32, transformed and padded, blocks of 16 columns in the order that suits the feedback;
    inputs, outputs: the two sides' feedback; own: each row's; input_noise: (m16,) tr(D) of each row, its own feedback
    included; blocks: (n16 / 16,) int64, which of the matrix's blocks lies where; None: each where it belongs.
    """

    weight: torch.Tensor
    inputs: Feedback
    outputs: Feedback
    own: RowFeedback | None
    input_noise: torch.Tensor
    rows: int
    cols: int
    blocks: torch.Tensor | None = None

    @cached_property
    def rms(self) -> torch.Tensor:
        """(m16,) standard deviation of the even rows that are as hard to code."""
        tiles = self.weight.square().unflatten(1, (-1, BLOCK)).mean(2)
        if self.blocks is not None:
            tiles = tiles[:, self.blocks.argsort()]
        width = block_width(self.weight.shape[1])
        return even_square(tiles.unflatten(1, (-1, width // BLOCK)).mean(2), width).sqrt()

    @cached_property
    def row_loss(self) -> torch.Tensor:
        """(m16,) KL per unit of normalised code error of each row."""
        return 0.5 * self.outputs.noise * self.rms.square() * self.input_noise

    def reordered(self, fisher: KroneckerFisher, order: torch.Tensor) -> Prepared:
        """The same matrix with its rows in another order (m,), to be priced: without its rows' own feedback.

        importance: in this one's order. The inputs' side stays as it is; G is factored again.
        """
        order = torch.cat((order, torch.arange(self.rows, len(self.weight))))
        outputs = _output_feedback(fisher.reordered(order[: self.rows]).outputs.float(), len(self.weight))
        weight, noise = self.weight[order], self.input_noise[order]
        return replace(self, weight=weight, outputs=outputs, own=None, input_noise=noise)

    def with_weight(self, weight: torch.Tensor) -> Prepared:
        """Another matrix (m, n) in the same place: the statistics are factored already."""
        return replace(self, weight=_in_order(_in_basis(weight), self.blocks))

    def restored(self, matrix: torch.Tensor) -> torch.Tensor:
        """A matrix (.., n16) whose columns lie as `weight`'s do, with each where it belongs, in its own memory."""
        return _in_order(matrix, None if self.blocks is None else self.blocks.argsort())


def prepare(
    weight: torch.Tensor,
    fisher: KroneckerFisher,
    known: tuple[torch.Tensor | None, Feedback] | None = None,
) -> Prepared:
    """Transform a weight (m, n) float32 and its statistics, and factor the latter.

    known: what `input_feedback` gives for this H, where that was computed already.
    """
    rows, cols = weight.shape
    w = _in_basis(weight)
    blocks, inputs = known or input_feedback(fisher.inputs)
    own = None
    if fisher.contexts is not None:
        own = row_feedback(inputs, _in_order(_in_basis(fisher.contexts), blocks))
    with one_thread():
        trace = inputs.noise.sum()
    noise = trace.expand(len(w)) if own is None else trace + own.noise
    outputs = _output_feedback(fisher.outputs.float(), len(w))
    return Prepared(_in_order(w, blocks), inputs, outputs, own, noise, rows, cols, blocks)


def damp(moment: torch.Tensor) -> None:
    """Add the inputs' damping to H (n, n), in place."""
    with one_thread():
        average = moment.diagonal().mean()
    moment.diagonal().add_(INPUT_DAMPING * average + 1e-12)


def input_feedback(moment: torch.Tensor) -> tuple[torch.Tensor, Feedback]:
    """The order of the blocks of columns (`Prepared.blocks`), and the feedback in it, for H (n, n)."""
    h = transform(transform(moment).T)
    h = h.add_(h.T.clone()).mul_(0.5)
    damp(h)
    blocks = rounding_order(h)
    columns = _columns(blocks)
    h = h[columns][:, columns]
    return blocks, block_ldl(h)


def _in_basis(matrix: torch.Tensor) -> torch.Tensor:
    """(m, n) float32, transformed along its rows, to (m16, n16)."""
    return transform(torch.nn.functional.pad(matrix, (0, 0, 0, -len(matrix) % BLOCK)))


def _columns(blocks: torch.Tensor) -> torch.Tensor:
    """Blocks of columns by number, column by column."""
    return (blocks[:, None] * BLOCK + torch.arange(BLOCK)).reshape(-1)


def _in_order(matrix: torch.Tensor, blocks: torch.Tensor | None) -> torch.Tensor:
    """The matrix (m, n16) with its blocks of columns in that order, in its own memory."""
    if blocks is not None:
        columns = _columns(blocks)
        for begin in range(0, len(matrix), ROWS_AT_ONCE):
            rows = matrix[begin : begin + ROWS_AT_ONCE]
            rows.copy_(rows[:, columns])
    return matrix


def removal_loss(weight: torch.Tensor, fisher: KroneckerFisher) -> torch.Tensor:
    """(m,) KL per token of leaving out each row of a weight (m, n) float32 altogether."""
    h, g = fisher.inputs.float(), fisher.outputs
    g = (g if g.dim() == 1 else g.diagonal()).float()
    with one_thread():
        average, damping = float(g.mean()), INPUT_DAMPING * float(h.diagonal().mean())
    # A removal is no small error: a row that looks free (saturated attention, say) counts as an average one.
    found = [((w @ h).add_(w, alpha=damping) * w).sum(1) for w in weight.split(chunk_rows(weight.shape[1]))]
    return 0.5 * g.clamp_min(average) * torch.cat(found)


def _output_feedback(moment: torch.Tensor, padded_rows: int) -> Feedback:
    if moment.dim() == 1:
        return Feedback(None, torch.nn.functional.pad(moment, (0, padded_rows - len(moment))))
    g = moment * (1.0 - OUTPUT_SHRINKAGE)
    g.diagonal().copy_(moment.diagonal() + OUTPUT_DAMPING * moment.diagonal().mean() + 1e-30)
    return block_ldl(pad_square(g))


def per_group(per_row: torch.Tensor) -> NDArray[np.float64]:
    """(groups,) sums over each group of 16 of the (m,) rows."""
    padded = torch.nn.functional.pad(per_row, (0, -len(per_row) % BLOCK))
    return padded.double().reshape(-1, BLOCK).sum(1).numpy()


def predicted_loss(
    sensitivity: NDArray[np.float64], removal: NDArray[np.float64], widths: tuple[float, ...], L: int
) -> NDArray[np.float64]:
    """KL per token of each group at each width, (groups, widths); width 0 leaves the group out."""
    error = MSE_BY_L[L]
    columns = [removal if width == 0 else sensitivity * error[width] * 4.0**-width for width in widths]
    return np.stack(columns, axis=1)


def round_prepared(
    prepared: Prepared,
    row_bits: NDArray[np.uint8],
    *,
    lowrank: tuple[PackedMatrix, PackedMatrix] | None = None,
    row_class: NDArray[np.uint8] | None = None,
    input_scale: NDArray[np.uint8] | None = None,
    L: int,
) -> PackedMatrix:
    """Round with feedback on both sides. row_bits: (groups,) uint8, the width of each group of 16 rows
    as it is stored.

    row_class: (rows,) where the prepared matrix's rows are those of another, sorted by it.
    input_scale: (cols,) where its columns are those of another, divided by it.
    """
    base, codes = row_scales(prepared.rms[: prepared.rows], row_bits, L)
    tiles = round_rows(prepared, row_bits, decode_scales(base, codes), L)
    return PackedMatrix(
        prepared.rows, prepared.cols, L, 0, base, row_bits, codes, tiles, lowrank, row_class, input_scale
    )  # fmt: skip


def row_scales(rms: torch.Tensor, row_bits: NDArray[np.uint8], L: int) -> tuple[float, NDArray[np.uint8]]:
    """The codes of the scales that suit rows of these deviations (m,), as `encode_scales` has them."""
    suiting = [SCALE_BY_L[L].get(bits, 0.0) for bits in bits_of(row_bits)]
    return encode_scales(rms.numpy() * np.array(suiting, np.float32).repeat(BLOCK)[: len(rms)])


def round_rows(
    prepared: Prepared, row_bits: NDArray[np.uint8], scale: NDArray[np.float32], L: int
) -> NDArray[np.uint8]:
    """The codes of a matrix's row groups, with these scales (m,) of its rows."""
    scales = np.zeros(len(prepared.weight), np.float32)
    scales[: prepared.rows] = scale
    tiles, _ = round_matrix(
        prepared.weight,
        scales,
        row_bits,
        L=L,
        input_feedback=prepared.inputs.factor,
        output_feedback=prepared.outputs.factor,
        row_feedback=None if prepared.own is None else (prepared.own.direction, prepared.own.pull),
    )
    return tiles if prepared.blocks is None else _tiles_in_place(tiles, row_bits, prepared.blocks.numpy())


def _tiles_in_place(
    tiles: NDArray[np.uint8], row_bits: NDArray[np.uint8], blocks: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """The codes of row groups whose tiles lie in the order of `blocks`, every tile where it belongs."""
    back = np.empty_like(tiles)
    begin = 0
    for nbytes in tile_nbytes(row_bits).tolist():
        end = begin + nbytes * len(blocks)
        back[begin:end].reshape(len(blocks), -1)[blocks] = tiles[begin:end].reshape(len(blocks), -1)
        begin = end
    return back


def round_plain(weight: torch.Tensor, bits: int, *, L: int) -> PackedMatrix:
    """Round a matrix (m, n) at one width without statistics."""
    rows, cols = weight.shape
    w = _in_basis(weight)
    nothing = Feedback(None, torch.ones(1))
    prepared = Prepared(w, nothing, nothing, None, torch.zeros(0), rows, cols)
    return round_prepared(prepared, np.full(len(w) // BLOCK, bits, np.uint8), L=L)
