"""The codes inside the blocks of GGUF types: where their bits are, and which values they stand for.

A weight is step * level[code] + offset. Steps and offsets depend on the scales of the block; they are read by decoding
the block with two codes, so only the places of the codes are known here (block structs in llama.cpp's ggml-common.h).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ciuic_cli.export.gguf.types import SUPER_BLOCK, TYPES, GgufType

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Bits:
    """Some bits of every code of a block.

    Attributes:
        place: (block,) int, the byte in the block of each weight. No other bits are in these bytes.
        shift: (block,) int, the lowest bit in that byte.
        width: number of bits. low: their place in the code.
    """

    place: NDArray[np.int64]
    shift: NDArray[np.int64]
    width: int
    low: int = 0


@dataclass(frozen=True)
class CodeLayout:
    """The codes of one type.

    Attributes:
        kind: the type.
        bits: where all bits of the codes are.
        levels: (codes,) float32, the value of every code, up to the step and the offset.
        searches_scale: whether llama.cpp takes the block's largest weight as the step, so that another step, the
            float16 at the block's begin, can be better.
    """

    kind: GgufType
    bits: tuple[Bits, ...]
    levels: Floats
    searches_scale: bool = False

    def set_codes(self, blocks: Bytes, codes: Bytes) -> None:
        """Write codes (blocks, weights) into blocks (blocks, bytes), in place."""
        for part in self.bits:
            blocks[:, np.unique(part.place)] = 0
            values = (codes >> np.uint8(part.low)) & np.uint8((1 << part.width) - 1)
            for shift in np.unique(part.shift).tolist():
                # Codes that share a byte have different shifts.
                chosen = np.flatnonzero(part.shift == shift)
                blocks[:, part.place[chosen]] |= values[:, chosen] << np.uint8(shift)

    def steps_and_offsets(self, blocks: Bytes) -> tuple[Floats, Floats]:
        """Step and offset of every weight, float32 (blocks, weights) each, of blocks (blocks, bytes)."""
        low, high = int(self.levels.argmin()), int(self.levels.argmax())
        trial = blocks.copy()
        values = []
        for code in (low, high):
            self.set_codes(trial, np.full((len(blocks), self.kind.block), code, np.uint8))
            values.append(self.decoded(trial))
        step = (values[1] - values[0]) / (self.levels[high] - self.levels[low])
        return step, values[0] - step * self.levels[low]

    def decoded(self, blocks: Bytes) -> Floats:
        """The weights (blocks, weights) float32 of blocks (blocks, bytes)."""
        import gguf

        number = gguf.GGMLQuantizationType.__members__.get(self.kind.name)
        if number in gguf.quants._type_traits:
            values: Floats = gguf.quants.dequantize(blocks, number)
            return values
        (part,) = self.bits  # Q2_0, which releases of the package gguf do not decode
        codes = (blocks[:, part.place] >> part.shift.astype(np.uint8)) & np.uint8((1 << part.width) - 1)
        return blocks[:, :2].copy().view(np.float16).astype(np.float32) * self.levels[codes]


def _nibbles(kind: GgufType, start: int, half: int) -> Bits:
    """The low four bits: runs of 2 x `half` weights in `half` bytes after `start`, the first half in the low bits."""
    run, inside = np.divmod(np.arange(kind.block), 2 * half)
    high, byte = np.divmod(inside, half)
    return Bits(start + run * half + byte, 4 * high, 4)


def _layouts() -> dict[str, CodeLayout]:
    import gguf

    named = {kind.name: kind for kind in TYPES}
    small, large = np.arange(32), np.arange(SUPER_BLOCK)
    fifth = {"Q5_0": 2, "Q5_1": 4}
    bits = {
        "Q2_0": (Bits(2 + np.arange(64) // 4, 2 * (np.arange(64) % 4), 2),),
        "MXFP4": (_nibbles(named["MXFP4"], 1, 16),),
        "Q4_0": (_nibbles(named["Q4_0"], 2, 16),),
        "IQ4_NL": (_nibbles(named["IQ4_NL"], 2, 16),),
        "Q4_1": (_nibbles(named["Q4_1"], 4, 16),),
        "IQ4_XS": (_nibbles(named["IQ4_XS"], 8, 16),),
        "Q4_K": (_nibbles(named["Q4_K"], 16, 32),),
        "Q5_K": (_nibbles(named["Q5_K"], 48, 32), Bits(16 + large % 32, large // 32, 1, 4)),
        "Q6_K": (
            _nibbles(named["Q6_K"], 0, 64),
            Bits(128 + 32 * (large // 128) + large % 32, 2 * (large % 128 // 32), 2, 4),
        ),
        **{
            name: (_nibbles(named[name], start + 4, 16), Bits(start + small // 8, small % 8, 1, 4))
            for name, start in fifth.items()
        },
    }
    uneven = {
        "IQ4_NL": gguf.quants.IQ4_NL.kvalues,
        "IQ4_XS": gguf.quants.IQ4_NL.kvalues,
        "MXFP4": gguf.quants.MXFP4.kvalues,
        "Q2_0": (-1, 0, 1, 2),
    }
    return {
        name: CodeLayout(
            named[name],
            parts,
            np.array(uneven.get(name, range(1 << sum(part.width for part in parts))), np.float32),
            searches_scale=name == "Q2_0",
        )
        for name, parts in bits.items()
    }


@functools.cache
def layout_of(name: str) -> CodeLayout | None:
    """Where a type has its codes; None for types whose codes stand for several weights together (`grid_of`), and for
    Q8_0, whose error is too small to matter."""
    return _layouts().get(name)
