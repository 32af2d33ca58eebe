"""The input transform: random signs and a block Hadamard matrix, so that weights look Gaussian.

T(x) = H (x * s) for every block of inputs. H is the orthonormal Hadamard matrix in Sylvester order, s the signs of the
block. The codes are those of T applied to each row of W, and W x = (T W) (T x). Source: QuIP# (Tseng et al. 2024), with
blocks instead of one large matrix.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from ciuic_cli.codecs import native
from ciuic_cli.integers import round_up

MAX_BLOCK = 1024
"""Largest block of the Hadamard transform, in inputs; part of the format."""

TILE = 16
"""Rows and columns of a tile of the trellis code; matrices are padded to multiples of it."""


def padded(length: int) -> int:
    """`length` rounded up to a multiple of 16."""
    return round_up(length, TILE)


def log2_block(cols_padded: int) -> int:
    """log2 of the block size: the largest power of two that divides `cols_padded`, at most 1024."""
    return min((cols_padded & -cols_padded).bit_length() - 1, MAX_BLOCK.bit_length() - 1)


def block_width(cols: int) -> int:
    """Block size, in inputs, of the transform of a matrix with `cols` columns."""
    return 1 << log2_block(padded(cols))


@functools.lru_cache(maxsize=64)
def _signs(cols_padded: int, seed: int) -> np.ndarray:
    h = (np.uint64(seed) * np.uint64(0x9E3779B1) + np.arange(cols_padded, dtype=np.uint64)).astype(np.uint32)
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> np.uint32(13)
    h *= np.uint32(0xC2B2AE35)
    h ^= h >> np.uint32(16)
    signs = np.where(h >> np.uint32(31), np.float32(-1), np.float32(1))
    signs.setflags(write=False)
    return signs


def signs(cols_padded: int, seed: int = 0) -> torch.Tensor:
    """The signs s of the transform, float32 [cols_padded], +1 or -1 (murmur3 finalizer of seed and index)."""
    return torch.from_numpy(_signs(cols_padded, seed).copy())


@functools.lru_cache(maxsize=256)
def _signs_on(device: torch.device, cols_padded: int, seed: int) -> torch.Tensor:
    """`signs` on a device. Cached, because a copy from pageable memory makes the host wait for the device."""
    return signs(cols_padded, seed).to(device)


def transform(x: torch.Tensor, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """T applied along the last dimension, which is zero-padded to a multiple of 16.

    Args:
        x: floating point [..., cols]; not changed.
        seed: of the signs.
        dtype: of the result. The arithmetic is float32 and is rounded once at the end.

    Returns:
        `dtype` [..., cols_padded] on x's device.
    """
    cols = x.shape[-1]
    out = x.to(dtype if _computes_in(x, dtype) else torch.float32)
    if padded(cols) != cols:
        out = torch.nn.functional.pad(out, (0, padded(cols) - cols))
    if out.data_ptr() == x.data_ptr() or not out.is_contiguous():
        out = out.clone(memory_format=torch.contiguous_format)
    return _apply(out, seed, inverse=False).to(dtype)


def inverse_transform(x: torch.Tensor, cols: int, seed: int = 0) -> torch.Tensor:
    """Inverse of `transform`: float32 [..., cols_padded] to float32 [..., cols]."""
    out = x.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    return inverse_transform_inplace(out, cols, seed)


def inverse_transform_inplace(x: torch.Tensor, cols: int, seed: int = 0) -> torch.Tensor:
    """As `inverse_transform`, for a contiguous float32 or bfloat16 tensor whose memory may be overwritten.

    Returns:
        x's dtype [..., cols], a view of x on the CPU. The arithmetic is float32.
    """
    out = x if _computes_in(x, x.dtype) else x.to(torch.float32)
    return _apply(out, seed, inverse=True)[..., :cols].to(x.dtype)


def transform_blocks(x: torch.Tensor, size: int, *, inverse: bool = False) -> torch.Tensor:
    """T, or its inverse, with seed 0 on blocks that all have the same signs, in torch operations: float32 (B, size)."""
    return _apply_torch(x, _signs_on(x.device, size, 0), size.bit_length() - 1, inverse=inverse)


def _computes_in(x: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether `_apply` takes x as `dtype` without rounding it before the transform."""
    return dtype == torch.float32 or (x.dtype == dtype == torch.bfloat16 and x.device.type == "cpu")


def _apply(x: torch.Tensor, seed: int, *, inverse: bool) -> torch.Tensor:
    """T or its inverse along x's last dimension; in place if x is on the CPU.

    x: contiguous float32, on the CPU also bfloat16.
    """
    cols = x.shape[-1]
    log2 = log2_block(cols)
    if x.device.type != "cpu":
        return _apply_torch(x, _signs_on(x.device, cols, seed), log2, inverse=inverse)
    rows = x.numel() // cols
    bf16 = int(x.dtype == torch.bfloat16)
    status = native.interface().ciuic_hadamard(
        x.data_ptr(), bf16, rows, cols, log2, seed, int(inverse), torch.get_num_threads()
    )
    native.check(status, "Hadamard transform")
    return x


def _apply_torch(x: torch.Tensor, sign: torch.Tensor, log2: int, *, inverse: bool) -> torch.Tensor:
    """The transform in torch operations: for devices without native code, and as the reference in tests."""
    shape = x.shape
    if not inverse:
        x = x * sign
    x = x.reshape(-1, 1 << log2)
    for stage in range(log2):
        pairs = x.reshape(x.shape[0], -1, 2, 1 << stage)
        x = torch.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), dim=2).reshape(
            x.shape
        )
    x = (x * (1 << log2) ** -0.5).reshape(shape)
    return x * sign if inverse else x
