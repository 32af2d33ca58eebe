"""The GPU encoder: its codes decode to its result, with the error of the native encoder and of exhaustive search."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from emulation import Emulator

from ciuic_cli.codecs import reference, trellis
from ciuic_cli.codecs.bits import BITS, stored_bits
from ciuic_cli.codecs.rate_distortion import SCALE_BY_L
from ciuic_cli.codecs.testing import tiles_as_matrix
from ciuic_cli.errors import UsageError
from ciuic_cli.kernels import encode


def gaussian(tiles: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tiles, 256, generator=torch.Generator().manual_seed(seed))


def stored(codes: torch.Tensor, bits: float, L: int) -> torch.Tensor:
    """Tiles of codes as the reference decodes them, float32 [tiles, 256]."""
    tiles = codes.shape[0]
    decoded = torch.from_numpy(reference.decode(tiles_as_matrix(codes.numpy(), bits, L)))
    return decoded.reshape(16, tiles, 16).transpose(0, 1).reshape(tiles, 256)


@pytest.mark.parametrize(("bits", "L"), [(b, 13) for b in BITS[1:]] + [(4, 16), (5.5, 16), (8, 16)])
def test_codes_decode_to_the_decoded_and_are_as_good_as_native(
    emulator: Emulator, bits: float, L: int
) -> None:
    tiles = 4 if L == 16 else 16
    targets = gaussian(tiles) / SCALE_BY_L[16][bits]
    codes, decoded = encode(emulator.tensor(targets), bits, L)
    assert codes.shape == (tiles, 32 * bits)
    torch.testing.assert_close(stored(codes, bits, L), decoded, rtol=0, atol=1e-6)
    matrix = targets.reshape(tiles, 16, 16).transpose(0, 1).reshape(16, -1).contiguous()
    _, native = trellis.round_matrix(matrix, np.ones(16, dtype=np.float32), [stored_bits(bits)], L=L)
    error = float((decoded - targets).square().mean())
    assert error < 1.01 * float((native - matrix).square().mean())


def test_close_to_exhaustive_search(emulator: Emulator) -> None:
    # The reference tries every overlap, which takes memory of 2^(2L - K): small L only.
    targets = gaussian(3, seed=4) / SCALE_BY_L[16][8]
    _, decoded = encode(emulator.tensor(targets), 8, 13)
    for tile in range(3):
        level_targets = targets[tile].double().numpy() * float(reference.CODE_SIGMA)
        _, best = reference.viterbi(level_targets, 8, 13)
        error = float((decoded[tile] - targets[tile]).double().square().sum())
        cost = error * float(reference.CODE_SIGMA) ** 2
        assert best * (1 - 1e-4) <= cost <= best * 1.02


@pytest.mark.parametrize(("bits", "near"), [(4, 0.1), (3.5, 0.2)])
def test_outliers_take_the_outermost_levels(emulator: Emulator, bits: float, near: float) -> None:
    targets = gaussian(2)
    targets[0, ::37] = 1e6
    targets[1, :] = 0.0
    codes, decoded = encode(emulator.tensor(targets), bits, 13)
    assert torch.isfinite(decoded).all()
    torch.testing.assert_close(stored(codes, bits, 13), decoded, rtol=0, atol=1e-6)
    assert float(decoded[0, ::37].min()) > 2.0 and float(decoded[1].abs().mean()) < near


@pytest.mark.parametrize("bits", [1, 1.5, 2.5, 5.5])
def test_paths_close_whatever_the_targets(emulator: Emulator, bits: float) -> None:
    # No path can follow these neighbours, so the start and the end of the circle pull in different directions.
    generator = torch.Generator().manual_seed(5)
    targets = torch.randint(-1, 2, (12, 256), generator=generator) * 1e3
    codes, decoded = encode(emulator.tensor(targets), bits, 13)
    torch.testing.assert_close(stored(codes, bits, 13), decoded, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bits", [3, 2.5])
def test_the_result_of_a_tile_does_not_depend_on_other_tiles(emulator: Emulator, bits: float) -> None:
    targets = gaussian(9, seed=8)
    together, _ = encode(emulator.tensor(targets), bits, 13)
    alone, _ = encode(emulator.tensor(targets[7:8].clone()), bits, 13)
    assert torch.equal(together[7:8], alone)


def test_refusals(emulator: Emulator) -> None:
    for targets, bits, L in (
        (torch.zeros(2, 255), 4, 16),
        (torch.zeros(2, 256, dtype=torch.float64), 4, 16),
        (torch.zeros(256, 2).T, 4, 16),
        (torch.zeros(2, 256), 6.5, 16),
        (torch.zeros(2, 256), 0, 16),
        (torch.zeros(2, 256), 4, 17),
    ):
        with pytest.raises(UsageError):
            encode(targets, bits, L)
    assert emulator.launched == []
    assert encode(torch.zeros(0, 256), 4.5)[0].shape == (0, 144)
