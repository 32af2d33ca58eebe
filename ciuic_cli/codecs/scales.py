"""Scales of rows and of inputs: positive factors on a logarithmic grid, one byte each.

Input scales have 16 steps per octave. Row scales have 16 or more: if the rows of a matrix have similar scales, 256
finer steps still span them."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
import torch

from ciuic_cli.errors import InputError

MAX_BASE = float(np.finfo(np.float32).max) / 2.0**16
"""Largest base of row scales: with the largest code, 2^15.9 times the base, a scale is still a finite float32."""

SCALE_STEPS = range(16, 16 + 256)
"""Steps per octave that row scales can have; part of the format. With 16, the default, 256 codes span 15.9 octaves."""

_CODE_OF_ONE = 128
"""Code of the input scale 1; part of the format."""

_LEAST_BASE = 2.0**-100
"""Least base of row scales, far below any weight that bfloat16 models have (chosen, not tuned)."""

Bytes = npt.NDArray[np.uint8]


def encode_scales(scales: npt.ArrayLike, steps: int = SCALE_STEPS[0]) -> tuple[float, Bytes]:
    """Rounds positive row scales to base * 2^(code / steps).

    Args:
        scales: float [rows]. Rows of zeros, whose scale is 0, get code 0.
        steps: steps per octave, one of SCALE_STEPS.

    Returns:
        (base, codes uint8 [rows]). `decode_scales(base, codes, steps)` differs from the scales by at most half a step
        (2.2 % for 16 steps), except for rows whose scale is more than 255 steps below the largest.

    Raises:
        InputError: a scale is negative, NaN or infinite.
    """
    exact = np.asarray(scales, dtype=np.float64)
    if not np.all(np.isfinite(exact)) or np.any(exact < 0):
        raise InputError("row scales must be finite and not negative")
    positive = exact[exact > 0]
    if positive.size == 0:
        return _LEAST_BASE, np.zeros(exact.shape, dtype=np.uint8)
    # Rows of zeros get code 0. If there are any, code 0 has to stand for a negligible scale.
    lowest = float(positive.max()) * 2.0 ** (-255 / steps)
    smallest = max(lowest if positive.size < exact.size else float(positive.min()), lowest, _LEAST_BASE)
    base = float(np.float32(min(smallest, MAX_BASE)))
    codes = np.rint(steps * np.log2(np.maximum(exact, base) / base))
    return base, np.clip(codes, 0, 255).astype(np.uint8)


def decode_scales(base: float, codes: Bytes, steps: int = SCALE_STEPS[0]) -> npt.NDArray[np.float32]:
    """Row scales, float32 [rows]: base * 2^(code / steps), each power rounded to float32 first."""
    return np.float32(base) * _powers(steps)[codes]


def finest_steps(scales: npt.NDArray[np.floating]) -> int:
    """The most steps per octave, of SCALE_STEPS, with which 255 steps span positive scales [rows]."""
    octaves = float(np.log2(scales.max() / scales.min()))
    return int(np.clip(255 // max(octaves, 1.0 / 256), SCALE_STEPS[0], SCALE_STEPS[-1]))


@functools.cache
def _powers(steps: int) -> npt.NDArray[np.float32]:
    """2^(code / steps) for every code, float32 [256]."""
    return np.exp2(np.arange(256) / steps).astype(np.float32)


def encode_input_scales(factors: torch.Tensor) -> Bytes:
    """Codes, uint8 [cols], of the input scales nearest to positive factors [cols], clamped to 2^-8 to 2^7.9."""
    codes = torch.round(16 * torch.log2(factors.double())) + _CODE_OF_ONE
    return np.asarray(codes.clamp(0, 255).to(torch.uint8).numpy())


def input_factors(input_scale: Bytes) -> torch.Tensor:
    """Input scales, float32 [cols], from their codes: 2^((code - 128) / 16), each power rounded to float32."""
    return torch.from_numpy(
        _powers(SCALE_STEPS[0])[input_scale] * np.float32(2.0 ** (-_CODE_OF_ONE / SCALE_STEPS[0]))
    )
