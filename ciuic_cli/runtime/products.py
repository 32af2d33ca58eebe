"""Products with a compressed matrix in bounded memory: W x, its gradient, and rows of W.

Products are computed in the transformed basis, W x = (T W)(T x), so that decoded weights need no inverse transform.
Batches of up to `small_batch` rows are multiplied straight from the codes. Larger ones are multiplied panel by panel: a
panel is a range of rows whose decoded weights fit PANEL_BYTES.
"""

from __future__ import annotations

import torch

from ciuic_cli.codecs.transform import TILE, inverse_transform, inverse_transform_inplace, transform
from ciuic_cli.process.processor import multiplies_bfloat16
from ciuic_cli.runtime.matrices import Matrix

SMALL_BATCH = 8
"""Default of `small_batch`. Measured values for the CPU kernels: `blobs.CPU_SMALL_BATCH`."""

PANEL_BYTES = 4 << 20
"""Scratch memory for decoded weights. Measured: 1 MB panels take 10 % longer, 64 MB panels twice as long (page
faults)."""


SORTED_PANEL_BYTES = 4 * PANEL_BYTES
"""The same for a whole matrix with sorted rows: reordering its rows costs less than the columns of activations."""

SCALED_ROWS = 64
"""Rows of 16-bit activations that are multiplied by input factors at a time. torch casts both sides of such a product
to float32; a few rows stay in the cache."""

PANELS_PER_SUM = 4
"""Panels whose share of a gradient is summed in the dtype of the factors before it is added to a float32 sum. Each
bfloat16 addition has a relative error of 0.0012; four panels give 0.0035, one 0.0029 (measured, Gaussian weights)."""


def product(
    matrix: Matrix,
    x: torch.Tensor,
    row_begin: int = 0,
    row_end: int | None = None,
    *,
    small_batch: int = SMALL_BATCH,
) -> torch.Tensor:
    """y = x W^T, or its columns row_begin to row_end - 1.

    Args:
        matrix: W, (rows, cols).
        x: floating [..., cols] on the matrix's device.
        small_batch: rows of x up to which multiplying straight from the codes is faster than decoding panels.

    Returns:
        [..., row_end - row_begin]: float32, or x's dtype if the product was computed in it.
    """
    row_end = matrix.rows if row_end is None else row_end
    batch = x.shape[:-1].numel()
    if matrix.is_zero or batch == 0:
        return torch.zeros((*x.shape[:-1], row_end - row_begin), dtype=torch.float32, device=x.device)
    whole = row_end - row_begin == matrix.rows
    y = matrix.small_product(x) if whole and batch <= small_batch else None
    if y is not None and matrix.lowrank is None:
        return y
    if matrix.input_factors is not None:
        x = _scaled(x, matrix.input_factors, torch.empty_like(x))
    if y is None:
        y = _by_panels(matrix, x, row_begin, row_end)
    if matrix.lowrank is not None:
        right, left = matrix.lowrank
        inner = product(right, x, small_batch=small_batch).to(torch.float32)
        # x (left right)^T = (x right^T) left^T. The rows of left^T are stored in the transformed basis, so one inverse
        # transform of the sum suffices.
        added = inverse_transform(inner @ left.decode(0, left.rows), left.cols, left.seed)
        y = y.to(torch.float32) + to_original_order(matrix, added)[..., row_begin:row_end]
    return y


def to_original_order(matrix: Matrix, y: torch.Tensor) -> torch.Tensor:
    """Columns of y [..., rows], which are in the order of the stored rows, in the order of W's rows."""
    return y if matrix.position is None else y.index_select(-1, matrix.position)


def gradient(
    matrix: Matrix, grad: torch.Tensor, row_begin: int = 0, row_end: int | None = None
) -> torch.Tensor:
    """The gradient of `product` for x: grad W, floating [batch, row_end - row_begin] to [batch, cols].

    Returns:
        `multiply_dtype(grad)`. Peak memory besides grad and the result: one panel of PANEL_BYTES (or 16 rows), or twice
        SORTED_PANEL_BYTES for a whole matrix with sorted rows, which is decoded at once and reordered; and the copies
        that the product makes of its columns of grad. If the matrix has more than PANELS_PER_SUM panels, also float32
        sums [batch, cols_padded]. A larger matrix with sorted rows needs a copy of grad, a low-rank part one of the
        result, input factors SCALED_ROWS rows of it in float32.
    """
    row_end = matrix.rows if row_end is None else row_end
    dtype = multiply_dtype(grad)
    if matrix.is_zero or grad.shape[0] == 0:
        return torch.zeros((grad.shape[0], matrix.cols), dtype=dtype, device=grad.device)
    grad = grad.to(dtype)
    panels = _panels(matrix, row_begin, row_end, dtype)
    reordered = None
    if matrix.position is not None:
        if matrix.lowrank is None and _is_one_panel(matrix, row_begin, row_end, dtype):
            panels, reordered = [(row_begin, row_end)], matrix.position
        else:
            whole = row_end - row_begin == matrix.rows  # every column is written
            empty = torch.empty if whole else torch.zeros
            scattered = empty((grad.shape[0], matrix.rows), dtype=dtype, device=grad.device)
            grad = scattered.index_copy_(1, matrix.position[row_begin:row_end].to(torch.int64), grad)
            row_begin, row_end = 0, matrix.rows
            panels = _panels(matrix, row_begin, row_end, dtype)
    total, partial = None, None
    for number, (begin, end) in enumerate(panels):
        columns = grad[:, begin - row_begin : end - row_begin]
        if partial is not None and number % PANELS_PER_SUM:
            partial.addmm_(columns, matrix.decode(begin, end, dtype))
            continue
        if partial is not None:
            total = partial.to(torch.float32) if total is None else total.add_(partial)
            partial = None  # frees it before the next one is made
        if reordered is None:
            partial = columns @ matrix.decode(begin, end, dtype)
        else:
            partial = columns @ matrix.decode(begin, end, dtype).index_select(0, reordered)
    assert partial is not None
    if total is not None:
        partial = total.add_(partial).to(dtype)
    result = inverse_transform_inplace(partial, matrix.cols, matrix.seed)
    if matrix.lowrank is not None:
        right, left = matrix.lowrank
        if (row_begin, row_end) != (0, matrix.rows):
            grad = torch.nn.functional.pad(grad, (row_begin, matrix.rows - row_end))
        inner = transform(grad, left.seed, dtype) @ left.decode(0, left.rows, dtype).T
        result += gradient(right, inner)
    return result if matrix.input_factors is None else _scaled(result, matrix.input_factors, result)


def rows_of(matrix: Matrix, rows: torch.Tensor) -> torch.Tensor:
    """The rows of W listed in `rows` (int64 [n]): float32 [n, cols] in the original basis."""
    if matrix.position is not None:
        rows = matrix.position.index_select(0, rows).to(torch.int64)
    out = inverse_transform(matrix.decode_rows(rows), matrix.cols, matrix.seed)
    if matrix.lowrank is not None:
        right, left = matrix.lowrank
        factors = inverse_transform(left.decode(0, left.rows), left.cols, left.seed)[:, rows]
        out += inverse_transform(factors.T @ right.decode(0, right.rows), matrix.cols, right.seed)
    return out if matrix.input_factors is None else _scaled(out, matrix.input_factors, out)


def _scaled(values: torch.Tensor, factors: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Values [..., cols] times float32 factors [cols], rounded once, in `out`, which may be `values`; returns it."""
    if values.dtype == torch.float32 or values.device.type != "cpu":
        return (
            torch.mul(values, factors, out=out)
            if values.dtype == torch.float32
            else out.copy_(values * factors)
        )
    cols = values.shape[-1]
    for part, to in zip(
        values.reshape(-1, cols).split(SCALED_ROWS),
        out.view(-1, out.shape[-1]).split(SCALED_ROWS),
        strict=True,
    ):
        to.copy_(part.to(torch.float32).mul_(factors))
    return out


def _by_panels(matrix: Matrix, x: torch.Tensor, row_begin: int, row_end: int) -> torch.Tensor:
    """x [..., cols], already times the input factors, times rows of W without the low-rank part."""
    dtype = multiply_dtype(x)
    transformed = transform(x.reshape(-1, matrix.cols), matrix.seed, dtype)
    shape = (*x.shape[:-1], row_end - row_begin)
    whole = row_end - row_begin == matrix.rows
    chosen = None if whole or matrix.position is None else matrix.position.to(torch.int64)

    def decoded(begin: int, end: int) -> torch.Tensor:
        if chosen is None:
            return matrix.decode(begin, end, dtype)
        return matrix.decode_rows(chosen[begin:end]).to(dtype)

    panels = _panels(matrix, row_begin, row_end, dtype)
    if len(panels) == 1 or (whole and _is_one_panel(matrix, row_begin, row_end, dtype)):
        weights = decoded(row_begin, row_end)
        if whole and matrix.position is not None:
            weights = weights.index_select(0, matrix.position)
        return (transformed @ weights.T).reshape(shape)
    y = torch.empty((transformed.shape[0], row_end - row_begin), dtype=dtype, device=x.device)
    for begin, end in panels:
        y[:, begin - row_begin : end - row_begin] = transformed @ decoded(begin, end).T
    return (to_original_order(matrix, y) if whole else y).reshape(shape)


def multiply_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype of both factors: x's dtype if the device has fast products of it (with float32 sums), else float32."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return torch.float32
    if x.device.type != "cpu" or (x.dtype == torch.bfloat16 and multiplies_bfloat16()):
        return x.dtype
    return torch.float32


def _is_one_panel(matrix: Matrix, row_begin: int, row_end: int, dtype: torch.dtype) -> bool:
    """Whether the row range is a whole matrix with sorted rows that is decoded at once."""
    nbytes = dtype.itemsize * matrix.rows * matrix.cols_padded
    is_whole = row_end - row_begin == matrix.rows
    return matrix.position is not None and is_whole and nbytes <= SORTED_PANEL_BYTES


def _panels(
    matrix: Matrix, row_begin: int, row_end: int, dtype: torch.dtype = torch.float32
) -> list[tuple[int, int]]:
    """Row ranges whose decoded weights fit PANEL_BYTES. All ranges but the first begin at a row group."""
    step = max(TILE, PANEL_BYTES // (dtype.itemsize * matrix.cols_padded) // TILE * TILE)
    inner = range((row_begin // TILE + 1) * TILE, row_end, TILE)
    starts = [row_begin, *inner[step // TILE - 1 :: step // TILE]]
    return list(zip(starts, [*starts[1:], row_end], strict=True))
