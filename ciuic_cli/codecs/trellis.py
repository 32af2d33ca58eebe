"""The trellis code: rounding, decoding and multiplying, on top of the native library.

Matrices here are in the transformed basis of `codecs.transform`, and rows are the stored ones (`PackedMatrix.order`),
unless a function says otherwise.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from ciuic_cli.codecs import native
from ciuic_cli.codecs.packing import PackedMatrix, group_offsets, packed_nbytes
from ciuic_cli.codecs.rate_distortion import MSE_BY_L, SCALE_BY_L
from ciuic_cli.codecs.scales import input_factors
from ciuic_cli.codecs.transform import TILE, inverse_transform
from ciuic_cli.errors import UsageError
from ciuic_cli.process.signals import defer_signals

DEFAULT_WINDOW = 16

# At the default window, by bits per weight K: best scale of the code relative to the weights' standard
# deviation, and mean squared error at that scale times 4^K. Other windows: codecs/figures.py.
CODE_SCALE = SCALE_BY_L[DEFAULT_WINDOW]
CODE_MSE = MSE_BY_L[DEFAULT_WINDOW]


def round_matrix(
    weight: torch.Tensor,
    scale: torch.Tensor | npt.NDArray[np.float32],
    row_bits: npt.ArrayLike,
    *,
    L: int = DEFAULT_WINDOW,
    input_feedback: torch.Tensor | None = None,
    output_feedback: torch.Tensor | None = None,
    row_feedback: tuple[torch.Tensor, torch.Tensor] | None = None,
    threads: int | None = None,
    progress: ctypes.c_long | None = None,
) -> tuple[npt.NDArray[np.uint8], torch.Tensor]:
    """Rounds a matrix to the trellis code, with error feedback along inputs (LDLQ) and outputs (two-sided).

    With E = weight - decoded, tile (I, J) is encoded from
    W_IJ + sum_{J'>J} E_IJ' A_J'J + sum_{I'>I} B_I'I^T P_I'J, where P_I'J = E_I'J + sum_{J'>J} E_I'J' A_J'J.
    Sources: GPTQ/LDLQ (QuIP, Chee et al. 2023); two-sided rounding (YAQA, Tseng et al. 2025).

    Args:
        weight: float32 [rows_padded, cols_padded], CPU, both multiples of 16.
        scale: float32 [rows_padded], scale of each row's code; 0 marks a padding row, whose error costs
            nothing.
        row_bits: [rows_padded / 16] bits per weight of each row group, as `PackedMatrix.row_bits` has them.
        L: window length, 12 to 16.
        input_feedback: A, float32 [cols_padded, cols_padded]; only what lies below its 16 x 16 diagonal
            blocks is read.
        output_feedback: B, float32 [rows_padded, rows_padded]; likewise.
        row_feedback: (direction, pull), each float32 [rows_padded, cols_padded], beside an input_feedback: row r of
            the target of tile J moves by pull_rJ times the sum over J' > J of P_rJ' · direction_rJ'.
        threads: default torch.get_num_threads(). The result does not depend on it.
        progress: counts finished tiles while the call runs; another thread may read it.

    Returns:
        (codes uint8, decoded matrix float32 [rows_padded, cols_padded]).

    Raises:
        UsageError: shapes, bits or dtypes that do not fit, NaN or infinite weights or feedback.
        EnvironmentFault: not enough memory.
    """
    rows, cols = weight.shape
    weight = _matrix(weight, (rows, cols), "weight")
    scales = np.ascontiguousarray(np.asarray(scale, dtype=np.float32))
    bits = np.ascontiguousarray(np.asarray(row_bits, dtype=np.uint8))
    if rows % TILE or cols % TILE or scales.shape != (rows,) or bits.shape != (rows // TILE,):
        raise UsageError(
            f"cannot round a {rows} x {cols} matrix with {scales.shape} scales and {bits.shape} row bits: "
            "rows and columns must be multiples of 16, with one scale per row and one bit width per 16 rows"
        )
    a = None if input_feedback is None else _matrix(input_feedback, (cols, cols), "input_feedback")
    b = None if output_feedback is None else _matrix(output_feedback, (rows, rows), "output_feedback")
    c, d = (None, None) if row_feedback is None else row_feedback
    direction = None if c is None else _matrix(c, (rows, cols), "direction")
    pull = None if d is None else _matrix(d, (rows, cols), "pull")
    offsets = group_offsets(bits, cols)
    codes = np.zeros(packed_nbytes(rows, cols, bits) - packed_nbytes(rows, cols, 0 * bits), dtype=np.uint8)
    decoded = torch.empty_like(weight)
    done = ctypes.c_long(0) if progress is None else progress
    status = _interruptible(
        lambda: native.interface().ciuic_round(
            weight.data_ptr(),
            rows,
            cols,
            None if a is None else a.data_ptr(),
            None if b is None else b.data_ptr(),
            None if direction is None else direction.data_ptr(),
            None if pull is None else pull.data_ptr(),
            scales.ctypes.data,
            bits.ctypes.data,
            L,
            threads or torch.get_num_threads(),
            codes.ctypes.data,
            offsets.ctypes.data,
            decoded.data_ptr(),
            ctypes.addressof(done),
        ),
        done,
    )
    native.check(status, f"rounding a {rows} x {cols} matrix")
    return codes, decoded


def _interruptible(call: Callable[[], int], progress: ctypes.c_long) -> int:
    """The result of a native call that counts in `progress`; an exception from a signal (Ctrl-C) ends it early.

    Signal handlers run in the main thread, and not before a native call there returns: so it runs in another.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    result: list[int] = []
    worker = threading.Thread(target=lambda: result.append(call()), name="ciuic-round")
    try:
        with defer_signals():
            worker.start()
        while worker.is_alive():
            worker.join(0.2)  # with a limit: a signal that another thread receives does not wake this one
    except BaseException:
        progress.value = -(2 ** (8 * ctypes.sizeof(ctypes.c_long) - 2))
        if worker.ident is not None:  # else the signal came before it was started
            worker.join()
        raise
    return result[0]


def decode(
    packed: PackedMatrix,
    row_begin: int = 0,
    row_end: int | None = None,
    out_dtype: torch.dtype = torch.float32,
    *,
    original_basis: bool = False,
    threads: int | None = None,
) -> torch.Tensor:
    """Decodes rows row_begin to row_end - 1, without the low-rank part.

    Returns:
        [row_end - row_begin, cols_padded] in the transformed basis, or [.., cols] with `original_basis`
        (inverse Hadamard transform and signs applied, padding cut), of `out_dtype`.

    Raises:
        UsageError: a row range outside the matrix.
    """
    row_end = packed.rows if row_end is None else row_end
    if not 0 <= row_begin <= row_end <= packed.rows:
        raise UsageError(f"rows {row_begin} to {row_end} are outside a matrix of {packed.rows} rows")
    half = out_dtype == torch.bfloat16 and not original_basis
    dtype = torch.bfloat16 if half else torch.float32
    out = torch.empty((row_end - row_begin, packed.cols_padded), dtype=dtype)
    status = native.interface().ciuic_decode(
        *packed.native_arguments,
        row_begin,
        row_end,
        out.data_ptr(),
        int(half),
        threads or torch.get_num_threads(),
    )
    native.check(status, "decoding")
    if original_basis:
        out = inverse_transform(out, packed.cols, packed.seed)
    return out.to(out_dtype)


def decode_dense(packed: PackedMatrix) -> torch.Tensor:
    """The matrix (rows, cols) float32 that a coded one stands for: low-rank part and input scales included, rows in
    their own order."""
    weight = decode(packed, original_basis=True)
    if packed.lowrank is not None:
        right, left = (decode(part, original_basis=True) for part in packed.lowrank)
        weight += left.T @ right
    if packed.input_scale is not None:
        weight *= input_factors(packed.input_scale)
    return weight if packed.position is None else weight[torch.from_numpy(packed.position)]


def decode_rows(packed: PackedMatrix, rows: torch.Tensor, *, threads: int | None = None) -> torch.Tensor:
    """Decodes the rows named by `rows` (int64 [n], any order), without the low-rank part.

    Returns:
        float32 [n, cols_padded], transformed basis.

    Raises:
        UsageError: a row outside the matrix.
    """
    index = rows.to(device="cpu", dtype=torch.int64).contiguous()
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < packed.rows:
        first, last = int(index.min()), int(index.max())
        raise UsageError(f"rows {first} to {last} are outside a matrix of {packed.rows} rows")
    out = torch.empty((index.numel(), packed.cols_padded), dtype=torch.float32)
    status = native.interface().ciuic_decode_rows(
        *packed.native_arguments,
        index.data_ptr(),
        index.numel(),
        out.data_ptr(),
        threads or torch.get_num_threads(),
    )
    native.check(status, "decoding rows")
    return out


def matmul(
    packed: PackedMatrix,
    x: torch.Tensor,
    out_dtype: torch.dtype = torch.float32,
    *,
    order: torch.Tensor | None = None,
    precise: bool | None = None,
    threads: int | None = None,
) -> torch.Tensor:
    """y = W x straight from the codes, without the low-rank part; meant for batches of 1 to 8.

    Activations are transformed and rounded per block of 256 inputs, the rest is exact up to float32 sums of
    blocks. With 15 bits the relative error against the product with the decoded matrix is 5e-5 on Gaussian
    activations, with int8 6e-3 (where the error of 4-bit weights is 7e-2); int8 takes two thirds of the time
    for one row.

    Args:
        x: float [..., cols], CPU, in the original basis.
        order: int32 [rows], CPU, contiguous: which element of y each stored row makes (`PackedMatrix.order`).
            Default: the order in which they are stored.
        precise: 15 bits for every row group; otherwise int8 for those of up to 4 bits per weight. Default:
            precise unless x is of half precision itself.
        threads: default torch.get_num_threads(). The result depends neither on it nor on the instruction
            set.

    Returns:
        [..., rows] of `out_dtype`, from float32 sums.

    Raises:
        UsageError: x has another number of columns; `order` is no order of the rows.
    """
    shape = x.shape
    if not shape or shape[-1] != packed.cols:
        raise UsageError(f"expected activations of shape [..., {packed.cols}], got {tuple(shape)}")
    if order is not None and not (_is_plain(order, torch.int32) and order.shape == (packed.rows,)):
        raise UsageError(f"the order of {packed.rows} rows must be contiguous int32 of that length")
    if precise is None:
        precise = x.dtype not in (torch.bfloat16, torch.float16)
    x_half, y_half = x.dtype == torch.bfloat16, out_dtype == torch.bfloat16
    if not x_half and x.dtype != torch.float32:
        x = x.to(torch.float32)
    x = x.contiguous()
    y = torch.empty((*shape[:-1], packed.rows), dtype=torch.bfloat16 if y_half else torch.float32)
    batch = x.numel() // packed.cols
    if batch == 0:
        return y.to(out_dtype)
    status = native.interface().ciuic_matmul(
        *packed.native_arguments,
        packed.log2_block,
        packed.seed,
        x.data_ptr(),
        x_half,
        batch,
        packed.cols,
        y.data_ptr(),
        y_half,
        packed.rows,
        None if order is None else order.data_ptr(),
        int(precise),
        threads or torch.get_num_threads(),
    )
    native.check(status, "multiplying")
    return y if y.dtype == out_dtype else y.to(out_dtype)


def _is_plain(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype == dtype and tensor.is_cpu and tensor.is_contiguous()


def _matrix(tensor: torch.Tensor, shape: tuple[int, int], name: str) -> torch.Tensor:
    if tuple(tensor.shape) != shape or tensor.dtype != torch.float32 or tensor.device.type != "cpu":
        raise UsageError(
            f"{name} must be float32 {shape} on the CPU, not {tensor.dtype} {tuple(tensor.shape)} "
            f"on {tensor.device}"
        )
    return tensor.detach().contiguous()
