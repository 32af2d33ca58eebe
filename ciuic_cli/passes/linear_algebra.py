"""Factors and solutions that have the same bits for any number of threads.

LAPACK cuts a large factorisation or triangular solution up by threads, and its rounding follows the cut. Here
blocks of 128 are solved by one thread, and the products between them, which are nearly all of the work, by all.
"""

from __future__ import annotations

import math

import torch

from ciuic_cli.process.threads import one_thread

BLOCK = 128


def cholesky(matrix: torch.Tensor) -> torch.Tensor | None:
    """The lower factor of a symmetric (n, n) float64 matrix; None where it is not positive definite."""
    lower = torch.zeros_like(matrix)
    for begin, end in _blocks(len(matrix)):
        rest = matrix[begin:, begin:end] - lower[begin:, :begin] @ lower[begin:end, :begin].T
        below = rest[end - begin :].T.contiguous()
        with one_thread():
            corner, info = torch.linalg.cholesky_ex(rest[: end - begin])
            if int(info) or not bool(torch.isfinite(corner).all()):
                return None
            lower[end:, begin:end] = torch.linalg.solve_triangular(corner, below, upper=False).T
        lower[begin:end, begin:end] = corner
    return lower


def damped_cholesky(matrix: torch.Tensor) -> tuple[torch.Tensor | None, float]:
    """The factor, and what had to be added to the diagonal, as a share of its mean, until there was one.

    A matrix that is singular to working precision is damped tenfold, at most to its mean diagonal; then None, infinity.
    """
    mean = float(matrix.diagonal().mean())
    for damping in (0.0, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1):
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
    for begin, end in _blocks(len(lower)):
        rest = values[begin:end] - lower[begin:end, :begin] @ x[:begin]
        with one_thread():
            x[begin:end] = torch.linalg.solve_triangular(lower[begin:end, begin:end], rest, upper=False)
    return x


def solve_transposed(lower: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """X (n, m) with Lᵀ X = values, for a lower triangular L (n, n)."""
    x = torch.empty_like(values)
    for begin, end in reversed(_blocks(len(lower))):
        rest = values[begin:end] - lower[end:, begin:end].T @ x[end:]
        with one_thread():
            x[begin:end] = torch.linalg.solve_triangular(lower[begin:end, begin:end].T, rest, upper=True)
    return x


def orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis (m, k) of the columns of an (m, k) matrix."""
    with one_thread():
        return torch.linalg.qr(columns).Q


def singular_values(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """U, S, Vᵀ of a matrix with few rows."""
    with one_thread():
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    return u, s, vh


def _blocks(size: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + BLOCK, size)) for begin in range(0, size, BLOCK)]
