"""The block code in torch operations: its definition, and what runs on devices without native code."""

from __future__ import annotations

import torch

from ciuic_cli.codecs import transform


def encode(
    blocks: torch.Tensor, bits: int, *, hadamard: bool, stochastic: bool, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of whole blocks.

    Args:
        blocks: float32 (B, size).
        bits: 8 or 4; integers are at most M = 127 or M = 7 in magnitude.
        hadamard: transform every block first (`codes.transform`, seed 0).
        stochastic: round x down or up at random, so that its expectation is x; otherwise to the nearest integer, half
            to even.
        seed: of the random numbers, 0 to 2^32 - 1.

    Returns:
        uint8 (B, size · bits / 8), and the scales, bfloat16 (B,). The scale is the largest magnitude of the block over
        M, rounded up; NaN if a number of the block is not finite; 0, with codes of 0, if it were below 2^-126.
    """
    count, size = blocks.shape
    most = 127 if bits == 8 else 7
    if hadamard:
        blocks = transform.transform_blocks(blocks, size)
    largest = blocks.abs().amax(dim=1)
    largest = torch.where(blocks.isfinite().all(dim=1), largest, torch.nan)
    scale = _rounded_up(largest / most)
    usable = (scale > 0)[:, None]
    scaled = torch.where(usable, blocks * (1.0 / scale.float())[:, None], 0.0)
    if stochastic:
        rounded = torch.floor(scaled + _uniform(count * size, seed, blocks.device).view(count, size))
    else:
        rounded = torch.round(scaled)
    integers = torch.where(usable, rounded, 0.0).clamp(-most, most).to(torch.int8)
    if bits == 8:
        return integers.view(torch.uint8), scale
    halves = (integers + 8).view(torch.uint8)
    return halves[:, 0::2] | halves[:, 1::2] << 4, scale


def decode(codes: torch.Tensor, scales: torch.Tensor, bits: int, *, hadamard: bool) -> torch.Tensor:
    """uint8 (B, size · bits / 8) and bfloat16 (B,) to float32 (B, size)."""
    if bits == 8:
        integers = codes.view(torch.int8)
    else:
        integers = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1).to(torch.int8) - 8
    values = integers.float() * scales.float()[:, None]
    return transform.transform_blocks(values, values.shape[1], inverse=True) if hadamard else values


def _rounded_up(value: torch.Tensor) -> torch.Tensor:
    """bfloat16, not below the float32 `value` (>= 0 or NaN); 0 if it were below 2^-126, the smallest normal number."""
    bits = value.view(torch.int32)
    up = torch.where(value.isnan(), bits, (bits + 0xFFFF) & -0x10000).view(torch.float32)
    smallest = torch.finfo(torch.float32).smallest_normal
    return torch.where(up < smallest, 0.0, up).to(torch.bfloat16)


def _uniform(count: int, seed: int, device: torch.device) -> torch.Tensor:
    """float32 (count,) in [0, 1): the upper 24 bits of murmur3's finalizer of seed and index."""
    mask = 0xFFFFFFFF
    h = (torch.arange(count, device=device) + seed * 0x9E3779B1) & mask
    h ^= h >> 16
    h = h * 0x85EBCA6B & mask
    h ^= h >> 13
    h = h * 0xC2B2AE35 & mask
    h ^= h >> 16
    return (h >> 8).float() * 2.0**-24
