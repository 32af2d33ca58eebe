"""Scales of rows and of inputs: positive factors in steps of a sixteenth of an octave, a byte each."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from ciuic_cli.errors import InputError

MAX_BASE = float(np.finfo(np.float32).max) / 2.0**16
"""With the largest code a row's scale is still a float32."""
_STEPS = np.exp2(np.arange(256) / 16.0).astype(np.float32)
_UNIT = 128
"""The code of an input scale of 1."""

Bytes = npt.NDArray[np.uint8]


def encode_scales(scales: npt.ArrayLike) -> tuple[float, Bytes]:
    """Rounds positive row scales to base * 2^(code / 16).

    Args:
        scales: float [rows]. Zeros (rows without weights) take code 0.

    Returns:
        (base, codes uint8 [rows]). A decoder sees the scales `decode_scales(base, codes)`, within 2.2 % of
        the wish unless a row's scale is more than 2^15.9 times below the largest.
    """
    wish = np.asarray(scales, dtype=np.float64)
    if not np.all(np.isfinite(wish)) or np.any(wish < 0):
        raise InputError("row scales must be finite and not negative")
    positive = wish[wish > 0]
    if positive.size == 0:
        return 2.0**-100, np.zeros(wish.shape, dtype=np.uint8)
    lowest = float(positive.max()) * 2.0 ** (-255 / 16)  # where rows are zero, their scale is next to nothing
    smallest = max(lowest if positive.size < wish.size else float(positive.min()), lowest, 2.0**-100)
    base = float(np.float32(min(smallest, MAX_BASE)))
    steps = np.rint(16 * np.log2(np.maximum(wish, base) / base))
    return base, np.clip(steps, 0, 255).astype(np.uint8)


def decode_scales(base: float, codes: Bytes) -> npt.NDArray[np.float32]:
    """float32 row scales: base * 2^(code / 16), each factor rounded to float32 first."""
    return np.float32(base) * _STEPS[codes]


def encode_input_scales(factors: torch.Tensor) -> Bytes:
    """Codes, uint8 [cols], of the input scales nearest to positive factors (cols), those being 2^-8 to 2^7.9."""
    steps = torch.round(16 * torch.log2(factors.double())) + _UNIT
    return np.asarray(steps.clamp(0, 255).to(torch.uint8).numpy())


def input_factors(input_scale: Bytes) -> torch.Tensor:
    """The input scales that codes stand for, float32 [cols]: 2^((code - 128) / 16), each power rounded to float32."""
    return torch.from_numpy(_STEPS[input_scale] * np.float32(2.0 ** (-_UNIT / 16)))
