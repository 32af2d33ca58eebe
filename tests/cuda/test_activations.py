"""The input transform on the emulated GPU, its rounding and its inverse, against codecs.transform."""

from __future__ import annotations

import pytest
import torch
from emulation import Emulator

from ciuic_cli.codecs.transform import inverse_transform, transform
from ciuic_cli.errors import UsageError
from ciuic_cli.kernels import activations
from ciuic_cli.kernels import parameters as p

WIDTHS = (16, 24, 48, 100, 144, 576, 1024, 1030, 2048, 5000)


def rows_of(width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(3, width, generator=generator)
    x[1] *= 1e-3
    x[2, width // 2] = 300.0  # an outlier
    return x.to(dtype)


@pytest.mark.parametrize("width", WIDTHS)
def test_bytes_and_residuals_hold_fifteen_bits(emulator: Emulator, width: int) -> None:
    x = emulator.tensor(rows_of(width))
    got = activations.forward(emulator, x, 7, p.TO_BYTES)
    exact = transform(x, 7)
    width = exact.shape[1]
    assert got.values.shape == (3, 2, -(-width // 64) * 64) and not got.values[:, :, width:].any()
    values = got.values[:, :, :width].double()
    rebuilt = got.scale.double()[:, None] * (values[:, 0] + values[:, 1] / 254)
    # Half a step of the residual (127 * 254 steps reach the largest value), plus float32 errors of the transform.
    bound = exact.abs().amax(dim=1, keepdim=True) * (0.51 / (127 * 254) + 2e-6)
    assert ((rebuilt - exact).abs() <= bound).all()
    assert torch.equal(got.sums, got.values.to(torch.int32).sum(dim=2).to(torch.int32))


@pytest.mark.parametrize("width", WIDTHS)
def test_halves_are_divided_by_a_power_of_two(emulator: Emulator, width: int) -> None:
    x = emulator.tensor(rows_of(width))
    got = activations.forward(emulator, x, 0, p.TO_HALF)
    exact = transform(x)
    assert torch.equal(torch.frexp(got.scale).mantissa, torch.full((3,), 0.5))
    peak = got.values.float().abs().amax(dim=1)
    assert ((peak >= 64) & (peak <= 128)).all()
    width = exact.shape[1]
    assert got.values.shape == (3, -(-width // 64) * 64) and not got.values[:, width:].any()
    rebuilt = got.values[:, :width].float() * got.scale[:, None]
    torch.testing.assert_close(rebuilt, exact, rtol=6e-4, atol=float(exact.abs().max()) * 2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_input_types_and_strides(emulator: Emulator, dtype: torch.dtype) -> None:
    wide = emulator.tensor(rows_of(200, dtype))
    x = wide[:, 20:120]
    got = activations.forward(emulator, x, 0, p.TO_BFLOAT)
    exact = transform(x)
    torch.testing.assert_close(got.values.float(), exact, rtol=4e-3, atol=float(exact.abs().max()) * 1e-6)


@pytest.mark.parametrize("width", WIDTHS)
def test_inverse(emulator: Emulator, width: int) -> None:
    x = rows_of(-(-width // 16) * 16)
    got = activations.inverse(emulator, emulator.tensor(x), width, 7)
    torch.testing.assert_close(got, inverse_transform(x, width, 7), rtol=1e-5, atol=1e-4)


def test_a_row_of_zeros_is_zeros(emulator: Emulator) -> None:
    x = emulator.tensor(torch.zeros(2, 48))
    for mode in (p.TO_BYTES, p.TO_HALF, p.TO_BFLOAT):
        got = activations.forward(emulator, x, 0, mode)
        assert not got.values.any() and torch.isfinite(got.scale).all()


@pytest.mark.parametrize("mode", [p.TO_BYTES, p.TO_HALF, p.TO_BFLOAT])
def test_nan_stays_nan(emulator: Emulator, mode: int) -> None:
    x = rows_of(48)
    x[0, 5] = float("nan")
    got = activations.forward(emulator, emulator.tensor(x), 0, mode)
    values = got.values.float()
    if mode != p.TO_BFLOAT:
        values = values * got.scale.reshape(-1, *[1] * (values.dim() - 1))
    assert values[0].isnan().any() and not values[1:].isnan().any()


def test_check_refusals() -> None:
    blob = torch.empty(16, dtype=torch.uint8)
    for x, message in (
        (torch.empty(3, 47), "48 columns"),
        (torch.empty(3, 48, dtype=torch.float64), "float64"),
        (torch.empty(3, 48, device="meta"), "meta"),
    ):
        with pytest.raises(UsageError, match=message):
            activations.check(x, 48, blob)
    assert activations.check(torch.empty(48, 3).T, 48, blob).stride(1) == 1
