"""Moments on the disk in a quarter of their float32 bytes: the diagonal, and half of the correlations in 16 bits.

An entry of a second moment M is M_ij = c_ij sqrt(M_ii M_jj) with a correlation c_ij in [-1, 1]. The diagonal is
stored in float32, and c_ij as a multiple of 2^-15. So an entry's error is at most 2^-16 sqrt(M_ii M_jj): small relative
to the two inputs that the entry couples, however much larger a third one is. bfloat16 has errors of c_ij 2^-9, with
which moments of one large direction stop being positive definite (measured:
docs/experiments/statistics/float32-moments.md).

The correlations are the blocks of rows of the lower triangle, one after another: rows b to b + BLOCK - 1 with columns 0
to b + BLOCK - 1.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

BLOCK = 64
"""Rows per stored block. BLOCK / 2 numbers per row lie above the diagonal and are stored twice; smaller blocks take
more time (chosen, not tuned)."""
_SCALE = 1 << 15
"""Stored number of a correlation of 1; those beyond the range of int16 are clipped."""
_LARGEST = _SCALE - 1


def compact(moment: torch.Tensor) -> dict[str, torch.Tensor]:
    """A symmetric moment (n, n) float32 with a diagonal of at least 0 as tensors that `expanded` reads.

    Returns:
        "diagonal" float32 (n,), and "correlations" int16 of `correlation_count(n)` numbers.
    """
    diagonal = moment.diagonal().clone()
    inverse = torch.where(diagonal > 0, diagonal.clamp_min(torch.finfo(torch.float32).tiny).rsqrt(), 0.0)
    parts = []
    for begin, end in _blocks(len(diagonal)):
        block = moment[begin:end, :end] * (inverse[begin:end, None] * _SCALE)
        parts.append(
            (block * inverse[:end]).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int16).reshape(-1).cpu()
        )
    return {"diagonal": diagonal.cpu(), "correlations": torch.cat(parts)}


def expanded(diagonal: torch.Tensor, correlations: torch.Tensor) -> torch.Tensor:
    """The moment (n, n) float32, exactly symmetric, from what `compact` returned."""
    size = len(diagonal)
    moment = torch.empty(size, size)
    root = diagonal.sqrt()
    scaled = root / _SCALE
    taken = 0
    for begin, end in _blocks(size):
        stored = correlations[taken : taken + (end - begin) * end].view(end - begin, end)
        taken += stored.numel()
        block = moment[begin:end, :end]
        torch.mul(stored, scaled[begin:end, None], out=block)
        block *= root[:end]
        corner = block[:, begin:end].tril(-1)
        block[:, begin:end] = corner + corner.T
        moment[:begin, begin:end] = block[:, :begin].T
    moment.diagonal().copy_(diagonal)
    return moment


def correlation_count(size: int) -> int:
    """Numbers in "correlations" of a moment with `size` rows."""
    return sum((end - begin) * end for begin, end in _blocks(size))


def compact_bytes(size: int) -> int:
    """Bytes of a compact moment with `size` rows."""
    return 4 * size + 2 * correlation_count(size)


def _blocks(size: int) -> Iterator[tuple[int, int]]:
    """First row of each block, and the first after it."""
    return ((begin, min(begin + BLOCK, size)) for begin in range(0, size, BLOCK))
