"""FP8 and FP4 decoding against a slow reference that works bit by bit and shares no code with it."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from ciuic_cli.checkpoint import formats
from ciuic_cli.errors import InputError


def minifloat(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """Value of a sign-exponent-mantissa code without infinities or NaN handling."""
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = code & ((1 << mantissa_bits) - 1)
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa * 2.0**-mantissa_bits) * 2.0 ** (exponent - bias)


def e4m3(code: int) -> float:
    return math.nan if code & 0x7F == 0x7F else minifloat(code, 4, 3, 7)


def e5m2(code: int) -> float:
    if code & 0x7C == 0x7C:
        return math.nan if code & 3 else math.copysign(math.inf, -1.0 if code & 0x80 else 1.0)
    return minifloat(code, 5, 2, 15)


def e2m1(code: int) -> float:
    return minifloat(code, 2, 1, 1)


FORMATS = {number_format.name: number_format for number_format in formats.FORMATS}


def decode_fp8(stored: torch.Tensor) -> torch.Tensor:
    (dtype,) = (name for name, dtype in formats.TORCH_DTYPES.items() if dtype == stored.dtype)
    return FORMATS[dtype].decode(stored)


def float32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Bit patterns, so that NaN equals NaN and -0 differs from 0."""
    return tensor.contiguous().view(torch.int32)


def reference_fp8(
    codes: list[list[int]], scales: list[list[float]], block: tuple[int, int], decode
) -> torch.Tensor:
    """Element by element. The product is exact in double (24 + 4 bits) and rounded once, to float32."""
    rows = [
        [float32(decode(code) * scales[r // block[0]][c // block[1]]) for c, code in enumerate(row)]
        for r, row in enumerate(codes)
    ]
    return torch.tensor(rows, dtype=torch.float32)


@pytest.mark.parametrize(
    ("dtype", "decode"), [(torch.float8_e4m3fn, e4m3), (torch.float8_e5m2, e5m2)], ids=["e4m3", "e5m2"]
)
@pytest.mark.parametrize(
    ("rows", "cols", "block"), [(16, 16, (128, 128)), (37, 50, (16, 16)), (20, 33, (8, 32))]
)
def test_fp8_with_block_scales_bit_by_bit(
    dtype, decode, rows: int, cols: int, block: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 256, (rows, cols), generator=generator, dtype=torch.uint8)
    codes.view(-1)[:256] = torch.arange(256)[: codes.numel()].to(
        torch.uint8
    )  # every code occurs if the matrix is large enough
    grid = (math.ceil(rows / block[0]), math.ceil(cols / block[1]))
    scales = torch.rand(grid, generator=generator) * 0.01 + 1e-4
    found_block = formats.scale_block((rows, cols), grid, block)
    found = formats.apply_scales(decode_fp8(codes.view(dtype)), scales, found_block)
    expected = reference_fp8(codes.tolist(), scales.tolist(), block, decode)
    finite = ~expected.isnan()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(bits(found)[finite], bits(expected)[finite])


def test_fp8_row_ranges_equal_the_whole() -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(45, 70, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 5, generator=generator)
    whole = formats.apply_scales(values.float(), scales, (16, 16))
    for begin, end in [(0, 45), (3, 20), (16, 32), (31, 45), (7, 7)]:
        part = formats.apply_scales(values[begin:end].float(), scales, (16, 16), begin)
        assert torch.equal(part, whole[begin:end])


@pytest.mark.parametrize("scale_shape", [(), (1,), (1, 1), (6,), (6, 1)])
def test_one_scale_per_tensor_or_per_row(scale_shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(6, 200, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(scale_shape, generator=generator)
    block = formats.scale_block((6, 200), scale_shape, None)
    expected = values.float() * (scales if scales.numel() == 1 else scales.reshape(6, 1))
    assert torch.equal(formats.apply_scales(values.float(), scales, block), expected)


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz]
)
@pytest.mark.parametrize("shape", [(0, 4), (1,), (3, 5), (16, 17), (256,)])
def test_fp8_conversion_equals_torchs_for_every_code(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    codes = torch.arange(math.prod(shape), dtype=torch.int32).to(torch.uint8).reshape(shape).view(dtype)
    found, expected = decode_fp8(codes), codes.to(torch.float32)
    assert found.shape == codes.shape and torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(bits(found)[~found.isnan()], bits(expected)[~expected.isnan()])


def test_fp8_slices_at_odd_offsets() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e5m2)
    for begin, end in [(1, 9), (3, 4), (5, 102)]:
        assert torch.equal(decode_fp8(codes[begin:end]), codes[begin:end].to(torch.float32))


def test_ue8m0_scales_are_powers_of_two() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    for scales in (codes, codes.view(torch.float8_e8m0fnu)):
        found = formats.decode_scales(scales)
        expected = torch.tensor([float32(2.0 ** (code - 127)) for code in range(255)])
        assert torch.equal(bits(found[:255]), bits(expected)) and found[255].isnan()
        assert found[0] == 2.0**-127  # a subnormal float32, not zero


def test_fp4_unpacks_low_nibble_first_bit_by_bit() -> None:
    packed = torch.arange(256, dtype=torch.uint8).reshape(4, 64)
    expected = [
        [e2m1(nibble) for byte in row for nibble in (byte & 15, byte >> 4)] for row in packed.tolist()
    ]
    found = FORMATS["FP4"].decode(packed)
    assert found.shape == (4, 128)
    assert torch.equal(bits(found), bits(torch.tensor(expected)))
    assert torch.equal(bits(FORMATS["FP4"].decode(packed.view(torch.int8))), bits(found))


@pytest.mark.parametrize("cols", [32, 96, 48])
def test_fp4_with_ue8m0_scales_bit_by_bit(cols: int) -> None:
    generator = torch.Generator().manual_seed(cols)
    packed = torch.randint(0, 256, (5, cols // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 140, (5, math.ceil(cols / 32)), generator=generator, dtype=torch.uint8)
    block = formats.scale_block((5, cols), tuple(scales.shape), (128, 128), fixed=FORMATS["FP4"].scale_block)
    assert block == (1, 32)
    expected = [
        [
            float32(
                e2m1((packed[r, c // 2].item() >> (4 * (c % 2))) & 15)
                * 2.0 ** (scales[r, c // 32].item() - 127)
            )
            for c in range(cols)
        ]
        for r in range(5)
    ]
    found = formats.apply_scales(FORMATS["FP4"].decode(packed), scales, block)
    assert torch.equal(bits(found), bits(torch.tensor(expected)))


@pytest.mark.parametrize(
    ("shape", "scale_shape", "fixed"),
    [
        ((256, 256), (2, 3), None),
        ((256, 256), (256, 2), None),
        ((8, 64), (8, 1), (1, 32)),
        ((8, 8, 8), (1,), None),
        ((256, 256), (), None),
        ((256, 256), (1, 1), None),
        ((256, 256), (256,), None),
        ((256, 256), (256, 8), None),
    ],
)
def test_24_a_scale_of_the_wrong_shape(
    shape: tuple[int, ...], scale_shape: tuple[int, ...], fixed: tuple[int, int] | None
) -> None:
    with pytest.raises(InputError) as caught:
        formats.scale_block(shape, scale_shape, (128, 128), fixed=fixed, tensor="layers.0.w")
    assert caught.value.tensor == "layers.0.w" and caught.value.remedy


def test_22_nan_and_infinity_are_counted() -> None:
    weight = torch.zeros(4, 5)
    weight[1, 2] = math.nan
    weight[3, 0] = -math.inf
    assert formats.count_nonfinite(weight) == 2
    assert formats.count_nonfinite(weight.to(torch.bfloat16)) == 2
    assert formats.count_nonfinite(weight.to(torch.float8_e5m2)) == 2
    assert formats.count_nonfinite(torch.ones(3, dtype=torch.int32)) == 0
    formats.require_finite(torch.zeros(3), "w")
    with pytest.raises(InputError, match="2 of 20") as caught:
        formats.require_finite(weight, "layers.0.w")
    assert caught.value.tensor == "layers.0.w"
