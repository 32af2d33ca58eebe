"""The bits pass: what rounding a matrix will cost at each width, and the rounding itself.

An error E in a matrix W (m outputs, n inputs) costs KL ≈ ½ tr(Eᵀ G E H) per token. In the transformed basis (random
signs and a block Hadamard on the inputs) H becomes H' = T H Tᵀ. With the block factorisations H' = L D Lᵀ and
G = M C Mᵀ (unit lower triangular in blocks of 16; D, C block diagonal) error feedback along inputs and outputs
leaves ½ Σ_r C_rr |η_r|² tr(D) / n, where η_r is what the trellis code itself leaves in row r: its variance is the
row's, times the code's normalised error at K bits. (LDLQ: QuIP#, Tseng et al. 2024; both sides: YAQA, 2025.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ciuic_cli.codecs.packing import PackedMatrix, decode_scales, encode_scales
from ciuic_cli.codecs.transform import transform
from ciuic_cli.codecs.trellis import MSE_BY_WINDOW, SCALE_BY_WINDOW, round_matrix
from ciuic_cli.passes.linear_algebra import damped_cholesky
from ciuic_cli.threads import one_thread

BLOCK = 16
INPUT_DAMPING = 0.01
"""Added to H's diagonal, as a share of its mean."""
OUTPUT_SHRINKAGE = 0.5
"""Share by which G's off-diagonal part is shrunk: it is estimated from few tokens and overfits."""
OUTPUT_DAMPING = 0.1
"""Added to G's diagonal, as a share of its mean: no output counts as entirely free."""


@dataclass(frozen=True)
class Importance:
    """What an error in a matrix costs per token. inputs: H (n, n) float32; outputs: G (m, m), or its diagonal (m,)."""

    inputs: torch.Tensor
    outputs: torch.Tensor

    def reordered(self, order: torch.Tensor) -> Importance:
        """Of the matrix whose rows are these rows (m,) of the other."""
        outputs = self.outputs[order]
        return Importance(self.inputs, outputs if outputs.dim() == 1 else outputs[:, order])


@dataclass(frozen=True)
class Feedback:
    """One side's error feedback. factor: (n, n) unit block lower triangular, None when there is none to
    feed back; noise: (n,) diagonal of D, the weight that the code's noise keeps; damping: what had to be added to
    the diagonal until the moment factored, as a share of its mean; infinite where it never did."""

    factor: torch.Tensor | None
    noise: torch.Tensor
    damping: float = 0.0


def block_ldl(moment: torch.Tensor) -> Feedback:
    """H = L D Lᵀ with unit lower triangular L and block diagonal D, in blocks of 16.

    A moment that is singular to working precision is damped tenfold until it factors (at most to its
    mean diagonal); then only its diagonal is used.
    """
    moment = moment.double()
    lower, damping = damped_cholesky(moment)
    if lower is None:
        return Feedback(None, moment.diagonal().float(), damping)
    count = len(moment) // BLOCK
    blocks = torch.stack(
        [lower[i * BLOCK : (i + 1) * BLOCK, i * BLOCK : (i + 1) * BLOCK] for i in range(count)]
    )
    inverse = torch.linalg.inv(blocks)
    columns = lower.reshape(len(moment), count, BLOCK).permute(1, 0, 2)  # (count, n, 16): block columns
    factor = torch.bmm(columns, inverse).permute(1, 0, 2).reshape(len(moment), len(moment))
    noise = blocks.square().sum(2).reshape(-1)  # diagonal of C_jj C_jjᵀ
    return Feedback(factor.float().contiguous(), noise.float(), damping)


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

    weight: (m16, n16) float32, transformed and padded; inputs, outputs: the two sides' feedback;
    deviation: (m16,) root mean square of each row; row_loss: (m16,) KL per unit of normalised code error of each row;
    sensitivity: (groups,) its sum over each group of 16 rows; removal: (groups,) KL of leaving the group out
    altogether.
    """

    weight: torch.Tensor
    inputs: Feedback
    outputs: Feedback
    deviation: torch.Tensor
    row_loss: torch.Tensor
    sensitivity: NDArray[np.float64]
    removal: NDArray[np.float64]
    rows: int
    cols: int


def prepare(weight: torch.Tensor, importance: Importance) -> Prepared:
    """Transform a weight (m, n) float32 and its statistics, and factor the latter."""
    rows, cols = weight.shape
    w = transform(torch.nn.functional.pad(weight, (0, 0, 0, -rows % BLOCK)))
    h = transform(transform(importance.inputs.float()).T.contiguous())
    h = 0.5 * (h + h.T)
    h.diagonal().add_(INPUT_DAMPING * h.diagonal().mean() + 1e-12)
    inputs = block_ldl(h)
    outputs = _output_feedback(importance.outputs.float(), w.shape[0])
    deviation = w.square().mean(1).sqrt()
    per_row = 0.5 * outputs.noise * deviation.square() * inputs.noise.sum()
    diagonal = importance.outputs if importance.outputs.dim() == 1 else importance.outputs.diagonal()
    diagonal = torch.nn.functional.pad(diagonal.float(), (0, w.shape[0] - rows))
    with one_thread():
        average = float(diagonal[:rows].mean())
    # A removal is no small error: a row that looks free (saturated attention, say) counts as an average one.
    gone = 0.5 * diagonal.clamp_min(average) * ((w @ h) * w).sum(1)
    return Prepared(
        w, inputs, outputs, deviation, per_row, _per_group(per_row), _per_group(gone), rows, cols
    )  # fmt: skip


def _output_feedback(moment: torch.Tensor, padded_rows: int) -> Feedback:
    if moment.dim() == 1:
        return Feedback(None, torch.nn.functional.pad(moment, (0, padded_rows - len(moment))))
    g = moment * (1.0 - OUTPUT_SHRINKAGE)
    g.diagonal().copy_(moment.diagonal() + OUTPUT_DAMPING * moment.diagonal().mean() + 1e-30)
    return block_ldl(pad_square(g))


def _per_group(per_row: torch.Tensor) -> NDArray[np.float64]:
    return per_row.double().reshape(-1, BLOCK).sum(1).numpy()


def predicted_loss(
    sensitivity: NDArray[np.float64], removal: NDArray[np.float64], widths: tuple[int, ...], window: int
) -> NDArray[np.float64]:
    """KL per token of each group at each width, (groups, widths); width 0 leaves the group out."""
    error = MSE_BY_WINDOW[window]
    columns = [removal if width == 0 else sensitivity * error[width] * 4.0**-width for width in widths]
    return np.stack(columns, axis=1)


def round_prepared(
    prepared: Prepared,
    row_bits: NDArray[np.uint8],
    *,
    lowrank: tuple[PackedMatrix, PackedMatrix] | None = None,
    row_class: NDArray[np.uint8] | None = None,
    window: int,
    threads: int,
) -> PackedMatrix:
    """Round with feedback on both sides. row_bits: (groups,) width of each group of 16 rows.

    row_class: (rows,) where the prepared matrix's rows are those of another, sorted by it.
    """
    best = np.array([SCALE_BY_WINDOW[window].get(int(width), 0.0) for width in row_bits], np.float32).repeat(
        BLOCK
    )
    base, codes = encode_scales((prepared.deviation.numpy() * best)[: prepared.rows])
    scales = np.zeros(len(prepared.weight), np.float32)
    scales[: prepared.rows] = decode_scales(base, codes)
    tiles, _ = round_matrix(
        prepared.weight,
        scales,
        row_bits,
        L=window,
        input_feedback=prepared.inputs.factor,
        output_feedback=prepared.outputs.factor,
        threads=threads,
    )
    return PackedMatrix(
        prepared.rows, prepared.cols, window, 0, base, row_bits, codes, tiles, lowrank, row_class
    )  # fmt: skip


def round_plain(weight: torch.Tensor, bits: int, *, window: int, threads: int) -> PackedMatrix:
    """Round a matrix (m, n) at one width without statistics."""
    rows, cols = weight.shape
    w = transform(torch.nn.functional.pad(weight, (0, 0, 0, -rows % BLOCK)))
    nothing = Feedback(None, torch.ones(1))
    empty = np.zeros(0)
    deviation = w.square().mean(1).sqrt()
    prepared = Prepared(w, nothing, nothing, deviation, torch.zeros(0), empty, empty, rows, cols)
    return round_prepared(prepared, np.full(len(w) // BLOCK, bits, np.uint8), window=window, threads=threads)
