"""Properties of row scales and input scales for any input: error of at most half a step, order, extremes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ciuic_cli.codecs.scales import (
    MAX_BASE,
    SCALE_STEPS,
    decode_scales,
    encode_input_scales,
    encode_scales,
    finest_steps,
    input_factors,
)
from ciuic_cli.errors import InputError

MAX_CODE = 255
FLOAT32_ERROR = 1e-6
"""Octaves. Base and powers are rounded to float32, each with a relative error of at most 6e-8."""

quick = settings(max_examples=150, deadline=None)
steps_per_octave = st.integers(SCALE_STEPS[0], SCALE_STEPS[-1])
positive_scales = st.lists(st.floats(2.0**-90, 2.0**90), min_size=1, max_size=40)
any_scales = st.lists(st.floats(0.0, allow_infinity=False), min_size=1, max_size=40)


@quick
@given(wish=positive_scales, zeros=st.integers(0, 3), steps=steps_per_octave)
def test_scales_in_the_span_are_within_half_a_step(wish: list[float], zeros: int, steps: int) -> None:
    scales = np.array([*wish, *[0.0] * zeros])
    base, codes = encode_scales(scales, steps)
    decoded = decode_scales(base, codes, steps).astype(np.float64)
    smallest_in_span = scales.max() * 2.0 ** (-MAX_CODE / steps)
    in_span = scales >= smallest_in_span
    error = np.abs(np.log2(decoded[in_span] / scales[in_span]))
    assert error.max() <= 0.5 / steps + FLOAT32_ERROR
    # Scales below the span take code 0, whose scale is then the smallest of the span.
    assert not codes[~in_span].any()
    assert np.allclose(decoded[~in_span], smallest_in_span, rtol=1e-6)


@quick
@given(wish=any_scales, steps=steps_per_octave)
def test_a_larger_scale_never_decodes_to_a_smaller_one(wish: list[float], steps: int) -> None:
    base, codes = encode_scales(np.sort(wish), steps)
    assert (np.diff(codes.astype(int)) >= 0).all()
    assert (np.diff(decode_scales(base, codes, steps)) >= 0).all()


@quick
@given(wish=any_scales, steps=steps_per_octave)
def test_any_finite_scales_give_a_base_that_a_blob_accepts(wish: list[float], steps: int) -> None:
    base, _ = encode_scales(wish, steps)
    assert 0.0 < base <= MAX_BASE and base == float(np.float32(base))
    every_code = np.arange(MAX_CODE + 1, dtype=np.uint8)
    assert np.isfinite(decode_scales(base, every_code, steps)).all()


@quick
@given(wish=positive_scales, steps=steps_per_octave)
def test_decoded_scales_are_encoded_without_further_loss(wish: list[float], steps: int) -> None:
    first = decode_scales(*encode_scales(wish, steps), steps)
    again = decode_scales(*encode_scales(first, steps), steps)
    np.testing.assert_allclose(again, first, rtol=1e-6)


@pytest.mark.parametrize("wrong", [-1.0, -1e-300, np.nan, np.inf, -np.inf])
def test_scales_that_are_negative_or_not_finite_are_refused(wrong: float) -> None:
    with pytest.raises(InputError, match="row scales"):
        encode_scales([1.0, wrong, 2.0])


@quick
@given(wish=positive_scales)
def test_finest_steps_are_the_most_that_span_the_scales(wish: list[float]) -> None:
    scales = np.array(wish)
    steps = finest_steps(scales)
    octaves = float(np.log2(scales.max() / scales.min()))
    assert steps in SCALE_STEPS
    assert steps == SCALE_STEPS[0] or MAX_CODE / steps >= octaves
    assert steps == SCALE_STEPS[-1] or MAX_CODE / (steps + 1) < octaves


@quick
@given(factors=st.lists(st.floats(1e-30, 1e30), min_size=1, max_size=40))
def test_input_scales_are_the_nearest_and_saturate(factors: list[float]) -> None:
    wish = torch.tensor(factors, dtype=torch.float64)
    decoded = input_factors(encode_input_scales(wish)).double()
    reachable = wish.clamp(2.0**-8, 2.0 ** (127 / 16))
    assert float((decoded / reachable).log2().abs().max()) <= 1 / 32 + FLOAT32_ERROR
    rising = input_factors(encode_input_scales(wish.sort().values))
    assert bool((rising.diff() >= 0).all())


def test_every_code_of_an_input_scale_is_the_code_of_its_factor() -> None:
    codes = np.arange(256, dtype=np.uint8)
    factors = input_factors(codes)
    assert factors.dtype == torch.float32
    assert (encode_input_scales(factors) == codes).all()
    torch.testing.assert_close(factors.double(), 2.0 ** ((torch.arange(256).double() - 128) / 16))
