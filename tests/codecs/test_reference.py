"""The reference decoder: bit order, windows and levels, on cases worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from ciuic_cli.codecs import reference
from ciuic_cli.codecs.bits import BITS


def test_levels_by_hand() -> None:
    # 1 * 0x83DCD12D: 0x83 + 0xDC + 0xD1 + 0x2D = 605; 2 * M = 0x07B9A25A: 7 + 185 + 162 + 90 = 444
    assert reference.levels(np.array([0, 1, 2])).tolist() == [-510, 605 - 510, 444 - 510]


def test_levels_look_gaussian() -> None:
    level = reference.levels(np.arange(1 << 16)).astype(float)
    assert abs(level.mean()) < 1.5
    assert abs(level.std() / float(reference.CODE_SIGMA) - 1) < 0.01
    assert abs((level**4).mean() / level.var() ** 2 - 2.7) < 0.05  # a sum of four uniforms; a Gaussian has 3


@pytest.mark.parametrize("bits", BITS[1:])
def test_string_order(bits: float) -> None:
    """Bit b lies in row b // 16K, in little-endian word (b % 16K) // 16, most significant bit first. If K is half an
    integer, the last 8 bits of a row are a byte."""
    row_bits, whole = int(16 * bits), int(bits)
    rng = np.random.default_rng(row_bits)
    for b in [
        0,
        1,
        15,
        16,
        row_bits - 8,
        row_bits - 1,
        row_bits,
        int(rng.integers(16 * row_bits)),
        16 * row_bits - 1,
    ]:
        row, within = divmod(b, row_bits)
        word, bit = divmod(within, 16)
        tile = np.zeros(2 * row_bits, dtype=np.uint8)
        if word < whole:
            tile[: 32 * whole].view("<u2")[16 * word + row] = 1 << (15 - bit)
        else:
            tile[32 * whole + row] = 1 << (7 - bit)
        assert np.flatnonzero(reference.tile_bits(tile, bits)).tolist() == [b]


@pytest.mark.parametrize("bits", [3, 3.5])
def test_windows_end_at_their_weight_and_wrap_around(bits: float) -> None:
    L = 12
    tile = np.random.default_rng(0).integers(0, 256, int(32 * bits), dtype=np.uint8)
    string = "".join(map(str, reference.tile_bits(tile, bits).tolist()))
    circle = string + string
    found = reference.tile_windows(tile, bits, L)
    for i in (0, 1, 7, 100, 255):
        end = int((i + 1) * bits) + len(string)
        assert found[i] == int(circle[end - L : end], 2)


@pytest.mark.parametrize("bits", BITS[1:])
@pytest.mark.parametrize("L", [12, 16])
def test_storing_windows_is_the_inverse_of_reading_them(bits: float, L: int) -> None:
    tile = np.random.default_rng(int(2 * bits)).integers(0, 256, int(32 * bits), dtype=np.uint8)
    assert np.array_equal(reference.store_windows(reference.tile_windows(tile, bits, L), bits), tile)


def test_exhaustive_search_finds_a_planted_path_and_beats_its_neighbours() -> None:
    bits, L = 6, 12
    tile = np.random.default_rng(3).integers(0, 256, 32 * bits, dtype=np.uint8)
    planted = reference.tile_windows(tile, bits, L)
    windows, cost = reference.viterbi(reference.levels(planted).astype(float), bits, L)
    assert cost == 0.0
    assert np.array_equal(reference.levels(windows), reference.levels(planted))
