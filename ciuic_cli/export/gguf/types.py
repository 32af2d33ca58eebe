"""The GGUF types that the plan may choose from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GgufType:
    """A GGUF type.

    Attributes:
        name: in llama.cpp.
        block: weights per block; rows must be a multiple of it.
        block_bytes: bytes of a block.
        file_type: the number of `general.file_type` of a file that is mostly of this type (enum llama_ftype).
        newer: whether only newer builds of llama.cpp have it; they list it in their help.
    """

    name: str
    block: int
    block_bytes: int
    file_type: int
    newer: bool = False

    def nbytes(self, weights: int) -> int:
        """Bytes of a tensor."""
        return weights // self.block * self.block_bytes


TYPES = (
    GgufType("IQ2_XXS", 256, 66, 19),
    GgufType("IQ2_XS", 256, 74, 20),
    GgufType("IQ2_S", 256, 82, 28),
    GgufType("IQ3_XXS", 256, 98, 23),
    GgufType("IQ3_S", 256, 110, 26),
    GgufType("IQ4_XS", 256, 136, 30),
    GgufType("Q4_K", 256, 144, 15),
    GgufType("Q5_K", 256, 176, 17),
    GgufType("Q6_K", 256, 210, 18),
    GgufType("Q2_0", 64, 18, 41, newer=True),
    GgufType("MXFP4", 32, 17, 38, newer=True),
    GgufType("Q4_0", 32, 18, 2),
    GgufType("IQ4_NL", 32, 18, 25),
    GgufType("Q4_1", 32, 20, 3),
    GgufType("Q5_0", 32, 22, 8),
    GgufType("Q5_1", 32, 24, 9),
    GgufType("Q8_0", 32, 34, 7),
)
"""The candidates, in the order of blocks and bits. Sizes: block structs in llama.cpp's ggml-common.h.

Left out (chosen): types below 2 bits, and Q2_K and Q3_K, beside which IQ2_S and IQ3_S need as many bytes or fewer."""
SUPER_BLOCK = 256
"""Weights of a block of K and I types. A tensor whose rows are a multiple of it needs no smaller block below 8 bits."""
LARGEST = TYPES[-1]
"""The type of tensors without a price."""


def candidates(cols: int, known: str) -> tuple[GgufType, ...]:
    """The types for rows of `cols` weights, by size; empty if no type's block fits.

    known: llama-quantize's help, which names newer types.
    """
    fitting = [
        kind for kind in TYPES if cols % kind.block == 0 and not (kind.newer and kind.name not in known)
    ]
    if cols % SUPER_BLOCK == 0:
        fitting = [kind for kind in fitting if kind.block == SUPER_BLOCK or kind is LARGEST]
    return tuple(sorted(fitting, key=lambda kind: kind.nbytes(kind.block * SUPER_BLOCK) / kind.block))


DEFAULT_TARGET_BITS = 4.5
"""Bits of the whole file per weight (chosen)."""
