"""GGUF types whose codes stand for several weights together: points of a grid, with a sign for every weight.

A weight is ± step * coordinate. Where the bits lie follows the block structs in llama.cpp's ggml-common.h; the package
gguf has the grids, and steps are read by decoding.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ciuic_cli.export.gguf.blocks import Bytes, Floats
from ciuic_cli.export.gguf.types import SUPER_BLOCK, TYPES, GgufType

_SCALE_BITS = np.uint32(0xF0000000)
"""Bits of a word of signs that hold the scale of its 32 weights."""


@dataclass(frozen=True)
class GridLayout:
    """The codes of one type.

    Attributes:
        kind: the type.
        grid: (points, width) float32, positive; a code is a point, and stands for `width` weights.
        even: whether every 8 weights must have an even number of negative signs, of which 7 are stored.
    """

    kind: GgufType
    grid: Floats
    even: bool

    @property
    def width(self) -> int:
        """Weights of a code."""
        return self.grid.shape[1]

    def set_codes(self, blocks: Bytes, points: NDArray[np.uint16], negative: NDArray[np.bool_]) -> None:
        """Write points (blocks, 256 / width) and signs (blocks, 256) into blocks (blocks, bytes), in place."""
        low, high = (points & 255).astype(np.uint8), points >> 8
        signs = np.packbits(negative, axis=1, bitorder="little")
        match self.kind.name:
            case "IQ2_XXS":
                words = blocks[:, 2:].reshape(len(blocks), -1, 8)
                words[..., :4] = low.reshape(len(blocks), -1, 4)
                words[..., 4:] = _with_signs(words[..., 4:], signs)
                blocks[:, 2:] = words.reshape(len(blocks), -1)
            case "IQ2_XS":
                blocks[:, 2:66] = (points | (signs & 127).astype(np.uint16) << 9).view(np.uint8)
            case "IQ2_S":
                blocks[:, 2:34], blocks[:, 34:66] = low, signs
                parts = high.reshape(len(blocks), -1, 4) << np.array([0, 2, 4, 6], np.uint16)
                blocks[:, 66:74] = parts.sum(2)
            case "IQ3_XXS":
                words = blocks[:, 66:].reshape(len(blocks), -1, 4)
                blocks[:, 2:66], blocks[:, 66:] = low, _with_signs(words, signs).reshape(len(blocks), -1)
            case "IQ3_S":
                blocks[:, 2:66], blocks[:, 74:106] = low, signs
                blocks[:, 66:74] = np.packbits(high.astype(bool), axis=1, bitorder="little")

    def steps(self, blocks: Bytes) -> Floats:
        """The step of every weight, float32 (blocks, 256), of blocks (blocks, bytes)."""
        trial = blocks.copy()
        shape = len(blocks), SUPER_BLOCK // self.width
        self.set_codes(trial, np.zeros(shape, np.uint16), np.zeros((len(blocks), SUPER_BLOCK), bool))
        return self.decoded(trial) / np.tile(self.grid[0], shape[1])

    def decoded(self, blocks: Bytes) -> Floats:
        """The weights (blocks, 256) float32 of blocks (blocks, bytes)."""
        import gguf

        values: Floats = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[self.kind.name])
        return values


def _with_signs(words: Bytes, signs: Bytes) -> Bytes:
    """Words (blocks, 8, 4 bytes) with 7 of each 8 signs (blocks, 32), and their own scale."""
    old = np.ascontiguousarray(words).view(np.uint32)[..., 0]
    seven = (signs & 127).astype(np.uint32).reshape(*old.shape, 4) << np.array([0, 7, 14, 21], np.uint32)
    new = (old & _SCALE_BITS) | np.bitwise_or.reduce(seven, axis=2)
    return new[..., None].view(np.uint8)


@functools.cache
def grid_of(name: str) -> GridLayout | None:
    """The grid of a type; None for types without one."""
    if name not in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"):
        return None
    import gguf

    source = getattr(gguf.quants, name)
    source.init_grid()
    (kind,) = (kind for kind in TYPES if kind.name == name)
    return GridLayout(kind, source.grid[0, 0].astype(np.float32), even=not name.endswith("_S"))
