"""The trellis code: rounding, decoding and multiplying, by the native library.

Matrices are in the transformed basis of `codecs.transform` and have stored rows (`MatrixHeader`), unless a function
says otherwise.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from ciuic_cli.codecs import native
from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.scales import input_factors
from ciuic_cli.codecs.sizes import codes_nbytes, group_offsets
from ciuic_cli.codecs.transform import TILE, inverse_transform_inplace
from ciuic_cli.errors import UsageError
from ciuic_cli.process.signals import defer_signals

DEFAULT_L = 16
"""Trellis state bits unless a caller says otherwise: the longest of the format, with the smallest error."""

_CANCEL = -(2 ** (8 * ctypes.sizeof(ctypes.c_long) - 2))
"""Value of `progress` that cancels a call: half of the least long, so that counting finished tiles cannot undo it."""

_JOIN_SECONDS = 0.2
"""Longest wait before Python looks for a signal again (chosen, not tuned)."""


def round_matrix(
    weight: torch.Tensor,
    scale: torch.Tensor | npt.NDArray[np.float32],
    row_bits: npt.ArrayLike,
    *,
    L: int = DEFAULT_L,
    input_feedback: torch.Tensor | None = None,
    output_feedback: torch.Tensor | None = None,
    row_feedback: tuple[torch.Tensor, torch.Tensor] | None = None,
    threads: int | None = None,
    progress: ctypes.c_long | None = None,
) -> tuple[npt.NDArray[np.uint8], torch.Tensor]:
    """Rounds a matrix to the trellis code, with error feedback along inputs (LDLQ) and outputs (two-sided).

    With E = weight - decoded, tile (I, J) is rounded to the path that is nearest to its target
    W_IJ + sum_{J'>J} E_IJ' A_J'J + sum_{I'>I} B_I'I^T P_I'J, where P_I'J = E_I'J + sum_{J'>J} E_I'J' A_J'J.
    Sources: GPTQ/LDLQ (QuIP, Chee et al. 2023); two-sided rounding (YAQA, Tseng et al. 2025).

    Args:
        weight: float32 [rows_padded, cols_padded], CPU, both multiples of 16.
        scale: float32 [rows_padded], scale of each row's code. A scale of 0 marks a padding row, whose error is
            ignored.
        row_bits: uint8 [rows_padded / 16], bits per weight of each row group, encoded by `stored_bits`.
        L: trellis state bits, 12 to 16.
        input_feedback: A, float32 [cols_padded, cols_padded]; only its part below the 16 x 16 diagonal blocks is read.
        output_feedback: B, float32 [rows_padded, rows_padded]; likewise.
        row_feedback: (direction, pull), each float32 [rows_padded, cols_padded]; needs an input_feedback. Row r of the
            target of block J moves by pull_rJ times the sum over J' > J of P_rJ' · direction_rJ'.
        threads: default torch.get_num_threads(). The result does not depend on it.
        progress: counts finished tiles during the call; another thread may read it.

    Returns:
        (codes uint8 [codes_nbytes], decoded matrix float32 [rows_padded, cols_padded]).

    Raises:
        UsageError: shapes, bits or dtypes do not fit, or weights or feedback contain NaN or infinite values.
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
    direction, pull = None, None
    if row_feedback is not None:
        direction = _matrix(row_feedback[0], (rows, cols), "direction")
        pull = _matrix(row_feedback[1], (rows, cols), "pull")
    offsets = group_offsets(bits, cols)
    codes = np.zeros(codes_nbytes(bits, cols), dtype=np.uint8)
    decoded = torch.empty_like(weight)
    done = ctypes.c_long(0) if progress is None else progress
    status = _interruptible(
        lambda: native.interface().ciuic_round(
            weight.data_ptr(),
            rows,
            cols,
            _address(a),
            _address(b),
            _address(direction),
            _address(pull),
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
    """Status of a native call that counts in `progress`; the exception of a signal handler (Ctrl-C) ends the call
    early.

    Python runs signal handlers in the main thread, and not during a native call. So a call from the main thread runs in
    a thread of its own.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    result: list[int] = []
    worker = threading.Thread(target=lambda: result.append(call()), name="ciuic-round")
    try:
        with defer_signals():
            worker.start()
        while worker.is_alive():
            worker.join(_JOIN_SECONDS)  # a signal that another thread receives does not wake this one
    except BaseException:
        progress.value = _CANCEL
        if worker.ident is not None:  # otherwise the signal came before the start
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
    """Decodes stored rows row_begin to row_end - 1, without the low-rank part and input scales.

    Returns:
        `out_dtype` [row_end - row_begin, cols_padded] in the transformed basis; with `original_basis` [.., cols], after
        the inverse transform.

    Raises:
        UsageError: the row range is outside the matrix.
    """
    header = packed.header
    row_end = header.rows if row_end is None else row_end
    if not 0 <= row_begin <= row_end <= header.rows:
        raise UsageError(f"rows {row_begin} to {row_end} are outside a matrix of {header.rows} rows")
    bf16 = out_dtype == torch.bfloat16 and not original_basis
    dtype = torch.bfloat16 if bf16 else torch.float32
    out = torch.empty((row_end - row_begin, header.cols_padded), dtype=dtype)
    status = native.interface().ciuic_decode(
        *packed.native_arguments,
        row_begin,
        row_end,
        out.data_ptr(),
        int(bf16),
        threads or torch.get_num_threads(),
    )
    native.check(status, "decoding")
    if original_basis:
        out = inverse_transform_inplace(out, header.cols, header.seed)
    return out.to(out_dtype)


def decode_dense(packed: PackedMatrix, row_begin: int = 0, row_end: int | None = None) -> torch.Tensor:
    """Rows row_begin to row_end - 1 of W, float32 [.., cols]: low-rank part and input scales included, in W's order.

    Raises UsageError if the row range is outside the matrix.
    """
    header = packed.header
    stored = None if header.position is None else torch.from_numpy(header.position[row_begin:row_end])
    if stored is None:
        weight = decode(packed, row_begin, row_end, original_basis=True)
    else:
        weight = inverse_transform_inplace(decode_rows(packed, stored), header.cols, header.seed)
    if packed.lowrank is not None:
        right, left = (decode(factor, original_basis=True) for factor in packed.lowrank)
        weight += (left[:, row_begin:row_end] if stored is None else left[:, stored]).T @ right
    if header.input_scale is not None:
        weight *= input_factors(header.input_scale)
    return weight


def decode_rows(packed: PackedMatrix, rows: torch.Tensor, *, threads: int | None = None) -> torch.Tensor:
    """Decodes some stored rows, without the low-rank part and input scales.

    Args:
        rows: integers [n], in any order.

    Returns:
        float32 [n, cols_padded] in the transformed basis.

    Raises:
        UsageError: a row is outside the matrix.
    """
    index = rows.to(device="cpu", dtype=torch.int64).contiguous()
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < packed.rows:
        first, last = int(index.min()), int(index.max())
        raise UsageError(f"rows {first} to {last} are outside a matrix of {packed.rows} rows")
    out = torch.empty((index.numel(), packed.header.cols_padded), dtype=torch.float32)
    status = native.interface().ciuic_decode_rows(
        *packed.native_arguments,
        index.data_ptr(),
        index.numel(),
        out.data_ptr(),
        threads or torch.get_num_threads(),
    )
    native.check(status, "decoding rows")
    return out


class Factor:
    """A packed matrix as the factor of products: what the native library has to know of it, collected once.

    Args:
        packed: the matrix; its low-rank part is ignored.
        order: int32 [rows], CPU, contiguous: the element of y that each stored row makes (`MatrixHeader.order`).
            Default: y's elements are in stored order.
        input_factors: float32 [cols], CPU, contiguous: inputs are multiplied by these first. Default: they are not.
        bias: float32 [rows], CPU, contiguous: added to y. Default: nothing is.

    Raises:
        UsageError: order, input_factors or bias has another shape, dtype or place.
    """

    def __init__(
        self,
        packed: PackedMatrix,
        *,
        order: torch.Tensor | None = None,
        input_factors: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> None:
        header = packed.header
        for tensor, dtype, length, name in (
            (order, torch.int32, header.rows, "order"),
            (input_factors, torch.float32, header.cols, "input_factors"),
            (bias, torch.float32, header.rows, "bias"),
        ):
            if tensor is not None and not (_is_plain(tensor, dtype) and tensor.shape == (length,)):
                raise UsageError(f"{name} must be contiguous {dtype} [{length}] on the CPU")
        self.rows, self.cols = header.rows, header.cols
        self.packed = packed
        # `native` has the addresses of these.
        self._order, self._input_factors, self._bias = order, input_factors, bias
        codes, offsets, bits, scales, rows, cols, L = packed.native_arguments
        self.native = native.CiuicMatrix(
            codes=codes,
            group_offset=offsets,
            row_bits=bits,
            scale=scales,
            order=_address(order),
            input_factors=_address(input_factors),
            bias=_address(bias),
            rows=rows,
            cols=cols,
            rows_out=header.rows,
            cols_in=header.cols,
            L=L,
            log2_block=header.log2_block,
            seed=header.seed,
        )
        self._reference = ctypes.addressof(self.native)

    def with_bias(self, bias: torch.Tensor) -> Factor:
        """The same factor with another bias, which is copied."""
        bias = bias.clone(memory_format=torch.contiguous_format)
        return Factor(self.packed, order=self._order, input_factors=self._input_factors, bias=bias)

    def multiply(
        self,
        x: torch.Tensor,
        out_dtype: torch.dtype = torch.float32,
        *,
        exact: bool | None = None,
        threads: int | None = None,
    ) -> torch.Tensor:
        """y = (x * input_factors) W^T + bias straight from the codes.

        Activations are transformed and rounded per block of 256 inputs; the rest is exact but for float32 sums of
        blocks. On Gaussian activations the relative error against the product with the decoded matrix is 5e-5 with 15
        bits and 6e-3 with int8. (The error of 4-bit weights is 7e-2.) With AMX, 40 and more rows of activations are
        multiplied in bfloat16 unless `exact`: 3e-3.

        Args:
            x: float [..., cols], CPU, in the original basis.
            exact: as exact as a float32 product (3e-7): activations are two numbers of 15 bits each, the second one
                what rounding left of the first. Otherwise activations are rounded to int8 for row groups of up to 4
                bits per weight, and to 15 bits for the others. Default: True unless x is float16 or bfloat16.
            threads: default torch.get_num_threads(). The result does not depend on it. But for products in bfloat16,
                it does not depend on the instruction set either.

        Returns:
            `out_dtype` [..., rows], from float32 sums.

        Raises:
            UsageError: x has another number of columns, or `order` is not a permutation of the rows.
        """
        shape = x.shape
        if not shape or shape[-1] != self.cols:
            raise UsageError(f"expected activations of shape [..., {self.cols}], got {tuple(shape)}")
        if exact is None:
            exact = is_exact(x.dtype)
        x_bf16, y_bf16 = x.dtype == torch.bfloat16, out_dtype == torch.bfloat16
        if not x_bf16 and x.dtype != torch.float32:
            x = x.to(torch.float32)
        x = x.contiguous()
        y = torch.empty((*shape[:-1], self.rows), dtype=torch.bfloat16 if y_bf16 else torch.float32)
        batch = x.numel() // self.cols
        if batch == 0:
            return y.to(out_dtype)
        status = native.interface().ciuic_matmul(
            self._reference,
            x.data_ptr(),
            x_bf16,
            batch,
            y.data_ptr(),
            y_bf16,
            exact,
            threads or torch.get_num_threads(),
        )
        native.check(status, "multiplying")
        return y if y.dtype == out_dtype else y.to(out_dtype)


def is_exact(dtype: torch.dtype) -> bool:
    """True if products keep activations of this dtype as exact as float32; those of 16-bit floats round them."""
    return dtype not in (torch.bfloat16, torch.float16)


def matmul(
    packed: PackedMatrix,
    x: torch.Tensor,
    out_dtype: torch.dtype = torch.float32,
    *,
    order: torch.Tensor | None = None,
    exact: bool | None = None,
    threads: int | None = None,
) -> torch.Tensor:
    """One product with a matrix that is not multiplied again; see `Factor`."""
    return Factor(packed, order=order).multiply(x, out_dtype, exact=exact, threads=threads)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _is_plain(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype == dtype and tensor.is_cpu and tensor.is_contiguous()


def _matrix(tensor: torch.Tensor, shape: tuple[int, int], name: str) -> torch.Tensor:
    if tuple(tensor.shape) != shape or tensor.dtype != torch.float32 or tensor.device.type != "cpu":
        raise UsageError(
            f"{name} must be float32 {shape} on the CPU, not {tensor.dtype} {tuple(tensor.shape)} "
            f"on {tensor.device}"
        )
    return tensor.detach().contiguous()
