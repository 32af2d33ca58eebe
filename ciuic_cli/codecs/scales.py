"""Scales of rows and of inputs: positive factors in steps of a sixteenth of an octave, a byte each.

Those of rows may have finer steps, where the rows of a matrix are enough alike that 256 of them span all.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
import torch

from ciuic_cli.errors import InputError

MAX_BASE = float(np.finfo(np.float32).max) / 2.0**16
"""With the largest code a row's scale is still a float32."""
SCALE_STEPS = range(16, 16 + 256)
"""Steps per octave that row scales can have; 16, the first, span 15.9 octaves."""
_UNIT = 128
"""The code of an input scale of 1."""

Bytes = npt.NDArray[np.uint8]


def encode_scales(scales: npt.ArrayLike, steps: int = SCALE_STEPS[0]) -> tuple[float, Bytes]:
    """Rounds positive row scales to base * 2^(code / steps).

    Args:
        scales: float [rows]. Zeros (rows without weights) take code 0.

    Returns:
        (base, codes uint8 [rows]). A decoder sees the scales `decode_scales(base, codes, steps)`, within half a step
        of the wish (2.2 % for 16 steps) unless a row's scale is more than 255 steps below the largest.
    """
    wish = np.asarray(scales, dtype=np.float64)
    if not np.all(np.isfinite(wish)) or np.any(wish < 0):
        raise InputError("row scales must be finite and not negative")
    positive = wish[wish > 0]
    if positive.size == 0:
        return 2.0**-100, np.zeros(wish.shape, dtype=np.uint8)
    # Where rows are zero, their scale is next to nothing.
    lowest = float(positive.max()) * 2.0 ** (-255 / steps)
    smallest = max(lowest if positive.size < wish.size else float(positive.min()), lowest, 2.0**-100)
    base = float(np.float32(min(smallest, MAX_BASE)))
    codes = np.rint(steps * np.log2(np.maximum(wish, base) / base))
    return base, np.clip(codes, 0, 255).astype(np.uint8)


def decode_scales(base: float, codes: Bytes, steps: int = SCALE_STEPS[0]) -> npt.NDArray[np.float32]:
    """float32 row scales: base * 2^(code / steps), each power rounded to float32 first."""
    return np.float32(base) * _powers(steps)[codes]


def finest_steps(scales: npt.NDArray[np.floating]) -> int:
    """The most steps per octave of which 255 span positive scales [rows], of SCALE_STEPS."""
    octaves = float(np.log2(scales.max() / scales.min()))
    return int(np.clip(255 // max(octaves, 1.0 / 256), SCALE_STEPS[0], SCALE_STEPS[-1]))


@functools.cache
def _powers(steps: int) -> npt.NDArray[np.float32]:
    """2^(code / steps) of every code, float32 [256]."""
    return np.exp2(np.arange(256) / steps).astype(np.float32)


def encode_input_scales(factors: torch.Tensor) -> Bytes:
    """Codes, uint8 [cols], of the input scales nearest to positive factors (cols), those being 2^-8 to 2^7.9."""
    steps = torch.round(16 * torch.log2(factors.double())) + _UNIT
    return np.asarray(steps.clamp(0, 255).to(torch.uint8).numpy())


def input_factors(input_scale: Bytes) -> torch.Tensor:
    """The input scales that codes stand for, float32 [cols]: 2^((code - 128) / 16), each power rounded to float32."""
    return torch.from_numpy(
        _powers(SCALE_STEPS[0])[input_scale] * np.float32(2.0 ** (-_UNIT / SCALE_STEPS[0]))
    )
