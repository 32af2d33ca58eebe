"""Encodes and decodes tensors in blocks of 8-bit or 4-bit integers.

A block of n numbers x is stored as integers q and a scale s: x ≈ s q, |q| <= M, M = 127 (8 bits) or 7 (4 bits). s is
the largest |x| / M, rounded up to bfloat16, so s <= max|x| / M · (1 + 2^-7). Errors, without the transform:

- nearest rounding: |s q - x| <= s / 2 for every number;
- stochastic rounding: |s q - x| < s, and the expectation of s q is x.

With the Hadamard transform (orthonormal), the same bounds hold for the transformed block. So the block's error has a
Euclidean norm of at most s / 2 · sqrt(n), or s · sqrt(n). (Float32 arithmetic adds about 1e-6 of the largest |x|.)
Blocks with a number that is not finite decode to NaN. Blocks whose largest |x| is below M · 2^-126 decode to zeros.

Fake tensors (torch's FakeTensorMode) have no numbers: for them the results have the right shapes and dtypes only.

A number takes bits + 16 / n bits. Source of the method: blockwise quantization (Dettmers et al. 2022), with symmetric
linear levels; the transform as in QuIP# (Tseng et al. 2024).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ciuic_cli.codecs import native
from ciuic_cli.codecs.blockcode import reference
from ciuic_cli.errors import UsageError

BLOCKS = (16, 32, 64, 128, 256, 512, 1024)
"""Numbers that a block may have."""


@dataclass(frozen=True)
class BlockCode:
    """A block code.

    Attributes:
        bits: 8 or 4.
        block: numbers per block, one of BLOCKS.
        stochastic: round at random, without bias, instead of to the nearest.
        hadamard: transform blocks, which spreads an outlier over its block.

    Raises:
        UsageError: bits or block have another value.
    """

    bits: int = 8
    block: int = 64
    stochastic: bool = False
    hadamard: bool = False

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise UsageError(f"a block code has 4 or 8 bits, not {self.bits}")
        if self.block not in BLOCKS:
            raise UsageError(f"a block has {', '.join(map(str, BLOCKS))} numbers, not {self.block}")

    def blocks(self, count: int) -> int:
        """Blocks for `count` numbers."""
        return -(-count // self.block)

    def nbytes(self, count: int) -> int:
        """Bytes of codes and scales of `count` numbers."""
        return self.blocks(count) * (self.block * self.bits // 8 + 2)


@dataclass(frozen=True)
class Encoded:
    """Codes, uint8 (blocks · block · bits / 8,), scales, bfloat16 (blocks,), and the number of elements of a tensor."""

    code: BlockCode
    codes: torch.Tensor
    scales: torch.Tensor
    count: int

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes


def encode(x: torch.Tensor, code: BlockCode, seed: int = 0) -> Encoded:
    """Encode the numbers of a contiguous floating-point tensor, in the order of its memory; computed in float32.

    Args:
        x: any shape and device.
        seed: of stochastic rounding; 32 bits of it are used. The same seed gives the same bytes on every device, except
            that a GPU may round a transformed block differently.
    """
    seed &= 0xFFFFFFFF
    count = x.numel()
    if x.device.type != "cpu":
        flat = torch.nn.functional.pad(x.reshape(-1).float(), (0, -count % code.block))
        codes, scales = reference.encode(
            flat.view(-1, code.block),
            code.bits,
            hadamard=code.hadamard,
            stochastic=code.stochastic,
            seed=seed,
        )
        return Encoded(code, codes.reshape(-1), scales, count)
    flat = x.detach().contiguous()
    if flat.dtype != torch.bfloat16:
        flat = flat.float()
    blocks = code.blocks(count)
    codes = torch.empty(blocks * code.block * code.bits // 8, dtype=torch.uint8)
    scales = torch.empty(blocks, dtype=torch.bfloat16)
    if isinstance(flat, FakeTensor):
        return Encoded(code, codes, scales, count)
    status = native.interface().ciuic_block_encode(
        *(flat.data_ptr(), int(flat.dtype == torch.bfloat16), count),
        *(code.bits, _log2(code.block), int(code.hadamard), int(code.stochastic), seed),
        *(codes.data_ptr(), scales.data_ptr(), torch.get_num_threads()),
    )
    native.check(status, "block code")
    return Encoded(code, codes, scales, count)


def decode(
    encoded: Encoded, dtype: torch.dtype = torch.float32, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The numbers of `encoded`, of `dtype`, in one dimension; written to `out`, contiguous and of any shape, if given.

    Raises:
        UsageError: `out` has another number of elements.
    """
    code, count = encoded.code, encoded.count
    if out is not None and (out.numel() != count or not out.is_contiguous()):
        raise UsageError(
            f"{count} decoded numbers do not fit a tensor of {out.numel()}, or it is not contiguous"
        )
    result = torch.empty(count, dtype=dtype, device=encoded.codes.device) if out is None else out.view(-1)
    if encoded.codes.device.type != "cpu":
        values = reference.decode(
            encoded.codes.view(encoded.scales.numel(), -1), encoded.scales, code.bits, hadamard=code.hadamard
        )
        return result.copy_(values.view(-1)[:count])
    native_dtype = result.dtype in (torch.float32, torch.bfloat16)
    target = result if native_dtype else torch.empty(count)
    if isinstance(target, FakeTensor):
        return result
    status = native.interface().ciuic_block_decode(
        *(encoded.codes.data_ptr(), encoded.scales.data_ptr(), count),
        *(code.bits, _log2(code.block), int(code.hadamard)),
        *(target.data_ptr(), int(target.dtype == torch.bfloat16), torch.get_num_threads()),
    )
    native.check(status, "block code")
    return result if native_dtype else result.copy_(target)


def _log2(block: int) -> int:
    return block.bit_length() - 1
