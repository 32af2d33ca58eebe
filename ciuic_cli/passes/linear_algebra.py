"""Cholesky factors, triangular solves and decompositions whose bits do not depend on the number of threads.

LAPACK splits a large factorisation or triangular solve among threads, and its rounding depends on the split. Here one
thread works on each panel of columns. The products between panels are nearly all of the work and use all threads.

A panel is solved by multiplying with the inverse of its corner on the diagonal: MKL solves triangular systems at a
ninth of the rate of its products (measured: docs/experiments/scale/arms.md). The callers damp their matrices, so that
the corners' inverses are exact enough.
"""

from __future__ import annotations

import itertools
import math

import torch

from ciuic_cli.passes.chunk_size import square_slices
from ciuic_cli.process.threads import one_thread

PANEL = 192
"""Columns of a panel, on which one thread works. Of 128 and 192, the faster (measured:
docs/experiments/scale/arms.md)."""
_WHOLE = 768
"""Most rows of a matrix that one thread factors as a whole. With 576 rows that takes half of the time that panels take,
with 1,536 as long as panels with one thread (measured: docs/experiments/scale/arms.md)."""
_LEAST_PANEL = 128
"""Least columns of a panel beside others: products with smaller sizes may depend on the number of threads (measured:
docs/experiments/statistics/thread-bits.md)."""
_SOLVED = 64
"""Most rows of a triangular matrix that is inverted by solving; larger ones are halved. Of 16 to 128, the fastest
(measured: docs/experiments/scale/arms.md)."""
_INVERSE_COLUMNS = 8 * PANEL
"""Columns of an inverse that are computed at a time, so that most products with the zeros above its diagonal are left
out: nearly half of all products (chosen, not tuned)."""
_LEAST_SINGULAR_VALUE = 1e-7
"""Singular values below this share of the largest count as 0. Chosen: a few times the root of float64's precision,
below which the eigenvalues of A Aᵀ are rounding errors."""
DAMPINGS = (0.0, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
"""Shares of the mean diagonal that `damped_cholesky` adds, in the order in which it tries them (chosen, not tuned)."""


def cholesky(matrix: torch.Tensor) -> torch.Tensor | None:
    """The lower Cholesky factor of a symmetric (n, n) matrix of floats; None if it is not positive definite."""
    if len(matrix) <= _WHOLE:
        with one_thread():
            return _corner(matrix)
    lower = torch.zeros_like(matrix)
    for begin, end in _panels(len(matrix)):
        residual = matrix[begin:, begin:end] - lower[begin:, :begin] @ lower[begin:end, :begin].T
        with one_thread():
            corner = _corner(residual[: end - begin])
            if corner is None:
                return None
            lower[begin:end, begin:end] = corner
            if end < len(matrix):
                lower[end:, begin:end] = residual[end - begin :] @ _inverse_of_corner(corner).T
    return lower


def _corner(matrix: torch.Tensor) -> torch.Tensor | None:
    """As `cholesky`, by torch. Call it with one thread."""
    lower, info = torch.linalg.cholesky_ex(matrix)
    # If a number of a row is NaN or infinite, the row's element on the diagonal is, too.
    return None if int(info) or not bool(torch.isfinite(lower.diagonal()).all()) else lower


def damped_cholesky(matrix: torch.Tensor) -> tuple[torch.Tensor | None, float]:
    """The Cholesky factor of a matrix (n, n) with the least of DAMPINGS that makes it positive definite.

    Returns:
        (factor, damping); (None, infinity) if the largest damping does not suffice.
    """
    mean = float(matrix.diagonal().mean())
    for damping in DAMPINGS:
        damped = matrix
        if damping:
            damped = matrix.clone()
            damped.diagonal().add_(damping * mean)
        lower = cholesky(damped)
        if lower is not None:
            return lower, damping
    return None, math.inf


def solve_lower(lower: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """X (n, m) with L X = values, for a lower triangular L (n, n)."""
    x = torch.empty_like(values)
    for begin, end in _panels(len(lower)):
        residual = values[begin:end] - lower[begin:end, :begin] @ x[:begin]
        with one_thread():
            x[begin:end] = _inverse_of_corner(lower[begin:end, begin:end]) @ residual
    return x


def inverse_lower(lower: torch.Tensor) -> torch.Tensor:
    """The inverse of a lower triangular L (n, n), which is lower triangular: a third of `solve_lower`'s work."""
    x = torch.zeros_like(lower)
    for begin, end in _panels(len(lower)):
        with one_thread():
            inverse = _inverse_of_corner(lower[begin:end, begin:end])
        x[begin:end, begin:end] = inverse
        for left in range(0, begin, _INVERSE_COLUMNS):
            right = min(left + _INVERSE_COLUMNS, begin)  # the rows above `left` are zero in these columns
            residual = lower[begin:end, left:begin] @ x[left:begin, left:right]
            with one_thread():
                x[begin:end, left:right] = inverse.neg() @ residual
    return x


def times_lower_transposed(values: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """V Lᵀ (m, n) for V (m, n) and a lower triangular L (n, n), without most of the products with L's zeros."""
    product = torch.empty_like(values)
    for begin, end in _panels(len(lower)):
        product[:, begin:end] = values[:, :end] @ lower[begin:end, :end].T
    return product


def transpose(matrix: torch.Tensor) -> None:
    """Transpose an (n, n) matrix in its own memory, square by square.

    Each square is copied to contiguous memory first, because torch's transposition is fast only there.
    """
    slices = square_slices(matrix)
    for number, left in enumerate(slices):
        matrix[left, left] = _transposed(matrix[left, left])
        for right in slices[:number]:
            upper = _transposed(matrix[right, left])
            matrix[right, left] = _transposed(matrix[left, right])
            matrix[left, right] = upper


def _transposed(matrix: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of the transpose."""
    return matrix.clone(memory_format=torch.contiguous_format).T.contiguous()


def solve_transposed(lower: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """X (n, m) with Lᵀ X = values, for a lower triangular L (n, n)."""
    x = torch.empty_like(values)
    for begin, end in reversed(_panels(len(lower))):
        residual = values[begin:end] - lower[end:, begin:end].T @ x[end:]
        with one_thread():
            x[begin:end] = _inverse_of_corner(lower[begin:end, begin:end]).T @ residual
    return x


def _inverse_of_corner(lower: torch.Tensor) -> torch.Tensor:
    """The inverse of a lower triangular (n, n) of at most a panel. Call it with one thread."""
    size = len(lower)
    if size <= _SOLVED:
        identity = torch.eye(size, dtype=lower.dtype, device=lower.device)
        return torch.linalg.solve_triangular(lower, identity, upper=False)
    half = size // 2
    first, last = _inverse_of_corner(lower[:half, :half]), _inverse_of_corner(lower[half:, half:])
    inverse = torch.zeros_like(lower)
    inverse[:half, :half], inverse[half:, half:] = first, last
    inverse[half:, :half] = -last @ lower[half:, :half] @ first
    return inverse


def orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis (m, k) of the columns of an (m, k) matrix."""
    with one_thread():
        return torch.linalg.qr(columns).Q


def singular_values(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """U (k, k), S (k,) and Vᵀ (k, n) of a matrix A (k, n) with no more rows than columns.

    From the eigenvectors of A Aᵀ in float64, because torch's decomposition takes several times as long (measured:
    docs/experiments/scale/arms.md). Singular values below 1e-7 of the largest, which would be rounding errors, are 0
    with rows of zeros in Vᵀ.
    """
    with one_thread():
        exact = matrix.double()
        squares, vectors = torch.linalg.eigh(exact @ exact.T)
        s, u = squares.clamp_min(0.0).sqrt().flip(0), vectors.flip(1)
        s = torch.where(s > _LEAST_SINGULAR_VALUE * s[0], s, 0.0)
        vh = u.T @ exact * torch.where(s > 0, 1 / s, 0.0)[:, None]
        return u.to(matrix.dtype), s.to(matrix.dtype), vh.to(matrix.dtype)


def _panels(size: int) -> list[tuple[int, int]]:
    # A last panel with too few columns is joined to the one before.
    starts = [begin for begin in range(0, size, PANEL) if begin == 0 or size - begin >= _LEAST_PANEL]
    return list(itertools.pairwise([*starts, size]))
