"""The block code: error bounds, unbiased rounding, sizes, and the same bytes from native code and torch.

Instruction sets are compared in test_native.py.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from ciuic_cli.codecs.blockcode import reference
from ciuic_cli.codecs.blockcode.code import BLOCKS, BlockCode, Encoded, decode, encode
from ciuic_cli.errors import UsageError
from ciuic_cli.process.threads import threads

CODES = [
    BlockCode(bits, block, stochastic, hadamard)
    for bits, block, stochastic, hadamard in itertools.product(
        (8, 4), (16, 64, 1024), (False, True), (False, True)
    )
]


def numbers(count: int, seed: int = 0) -> torch.Tensor:
    """Heavy-tailed, with blocks of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator)
    return x * torch.exp(3 * torch.randn(count, generator=generator))


@pytest.mark.parametrize("code", CODES, ids=str)
def test_errors_stay_within_the_documented_bounds(code: BlockCode) -> None:
    x = numbers(8 * 1024)
    encoded = encode(x, code, seed=5)
    assert encoded.nbytes == code.nbytes(x.numel()) == x.numel() * code.bits / 8 + 2 * x.numel() / code.block
    most = 127 if code.bits == 8 else 7
    blocks, scales = x.view(-1, code.block), encoded.scales.float()
    error = (decode(encoded).view(-1, code.block) - blocks).abs()
    allowed = scales * (1.0 if code.stochastic else 0.5) + 1e-6 * blocks.abs().amax(1)
    if code.hadamard:
        assert (error.norm(dim=1) <= allowed * code.block**0.5).all()
    else:
        assert (error <= allowed[:, None]).all()
        largest = blocks.abs().amax(1)
        assert (scales * most >= largest * (1 - 1e-6)).all()
        assert (scales * most <= largest * (1 + 2**-7)).all()


@pytest.mark.parametrize("code", CODES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_code_and_torch_give_the_same_bytes(code: BlockCode, dtype: torch.dtype) -> None:
    x = numbers(5 * 1024 + 3, seed=1).to(dtype)
    x[1024:2048] = 0
    x[2048:3072] *= 1e-38
    x[3072] = float("inf")
    x[4100] = float("nan")
    encoded = encode(x, code, seed=0xDEADBEEF)
    padded = torch.nn.functional.pad(x.float(), (0, -len(x) % code.block)).view(-1, code.block)
    codes, scales = reference.encode(
        padded, code.bits, hadamard=code.hadamard, stochastic=code.stochastic, seed=0xDEADBEEF
    )
    assert torch.equal(encoded.codes, codes.view(-1))
    assert torch.equal(encoded.scales.nan_to_num(-1.0), scales.nan_to_num(-1.0))
    values = reference.decode(codes, scales, code.bits, hadamard=code.hadamard).view(-1)[: len(x)]
    found = decode(encoded, dtype)
    assert torch.equal(found.nan_to_num(7.0), values.to(dtype).nan_to_num(7.0))
    assert found[3072].isnan() and found[4100].isnan() and (found[1024:2048] == 0).all()
    assert found[:1024].isfinite().all()


def test_stochastic_rounding_has_no_bias_and_nearest_rounding_loses_small_changes() -> None:
    x = torch.full((64,), 0.3)
    x[0] = 127.0
    runs = 4000
    mean = sum(decode(encode(x, BlockCode(stochastic=True), seed=seed)) for seed in range(runs)) / runs
    assert (mean - x).abs().max() < 5 * 0.5 / runs**0.5  # five standard deviations of a coin
    assert (decode(encode(x, BlockCode()))[1:] == 0).all()


def test_bytes_do_not_depend_on_threads() -> None:
    x, code = numbers(300_000), BlockCode(bits=4, stochastic=True, hadamard=True)
    with threads(1):
        one = encode(x, code, seed=3)
    with threads(2):
        two = encode(x, code, seed=3)
        assert torch.equal(one.codes, two.codes) and torch.equal(decode(one), decode(two))


def test_the_transform_spreads_an_outlier() -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    x[7] = 40.0
    plain, spread = (decode(encode(x, BlockCode(4, hadamard=hadamard))) for hadamard in (False, True))
    assert (spread - x).norm() < 0.6 * (plain - x).norm()


def test_shapes_dtypes_and_refusals() -> None:
    x = numbers(33).view(3, 11)
    out = torch.empty(3, 11, dtype=torch.float16)
    decode(encode(x.half(), BlockCode(block=16)), out=out)
    assert (out.float() - x).abs().max() < 0.01 * x.abs().max()
    assert decode(encode(torch.empty(0), BlockCode())).numel() == 0
    with pytest.raises(UsageError, match="do not fit"):
        decode(encode(x, BlockCode()), out=torch.empty(34))
    with pytest.raises(UsageError, match="4 or 8 bits"):
        BlockCode(bits=3)
    with pytest.raises(UsageError, match="not 48"):
        BlockCode(block=48)
    assert all(BlockCode(block=block).blocks(block + 1) == 2 for block in BLOCKS)
    assert Encoded is type(encode(x, BlockCode()))
