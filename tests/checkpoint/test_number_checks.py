"""Values that are not finite are counted wherever they are, and scales of every accepted shape find their block."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ciuic_cli.checkpoint import formats
from ciuic_cli.errors import InputError

WIDE = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
values = st.floats(-1e30, 1e30) | st.sampled_from(
    [math.nan, math.inf, -math.inf, 65504.0, 65520.0, 3.4e38, 1e300]
)


@settings(max_examples=150, deadline=None)
@given(
    numbers=st.lists(values, max_size=40),
    stored=st.sampled_from(WIDE),
    wanted=st.sampled_from(WIDE),
    part=st.integers(1, 50),
)
def test_every_value_that_is_not_finite_in_the_wanted_dtype_is_counted(
    numbers: list[float], stored: torch.dtype, wanted: torch.dtype, part: int
) -> None:
    """However many values are looked at together."""
    tensor = torch.tensor(numbers, dtype=torch.float64).to(stored)
    expected = sum(not math.isfinite(value) for value in tensor.to(wanted).double().tolist())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "_FINITE_ELEMENTS", part)
        assert formats.count_nonfinite(tensor, wanted) == expected


@pytest.mark.parametrize(
    ("value", "message", "remedy"),
    [
        (1e5, "3 of 6 values are NaN or infinite in float16", "config.json needs a wider dtype"),
        (math.nan, "3 of 6 values are NaN or infinite in float16", "cannot be compressed"),
    ],
)
def test_the_remedy_tells_damage_from_a_narrow_dtype(value: float, message: str, remedy: str) -> None:
    tensor = torch.tensor([[1.0, value, value], [0.0, -1.0, value]])
    with pytest.raises(InputError, match=message) as caught:
        formats.require_finite(tensor, "w", torch.float16)
    assert caught.value.tensor == "w" and remedy in str(caught.value.remedy)
    if math.isfinite(value):
        formats.require_finite(tensor, "w", torch.bfloat16)


@pytest.mark.parametrize(
    ("shape", "scale_shape", "block"),
    [
        ((256, 300), (), (256, 300)),
        ((256, 300), (1,), (256, 300)),
        ((256, 300), (1, 1), (256, 300)),
        ((256, 300), (256,), (1, 300)),
        ((256, 300), (256, 1), (1, 300)),
        ((256, 300), (2, 3), (128, 128)),
        ((256, 300), (256, 10), (1, 32)),
        ((129, 65), (2, 1), (128, 128)),
        ((0, 4), (1,), (1, 4)),
    ],
)
def test_without_a_stated_block_every_usual_scale_shape_is_accepted(
    shape: tuple[int, int], scale_shape: tuple[int, ...], block: tuple[int, int]
) -> None:
    assert formats.scale_block(shape, scale_shape, None) == block


@pytest.mark.parametrize("scale_shape", [(2,), (3, 2), (2, 2), (256, 9), (300,), (1, 300), (256, 1, 1)])
def test_other_scale_shapes_are_refused_with_the_expected_ones(scale_shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"needs \(2, 3\) or \(256, 10\)"):
        formats.scale_block((256, 300), scale_shape, None)
