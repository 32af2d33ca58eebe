"""The stand-in for main memory or a disk, to which fake activations are moved."""

from __future__ import annotations

import torch

from ciuic_cli.codecs.blockcode.code import BlockCode, Encoded
from ciuic_cli.train.memory.offload import Place


class Elsewhere:
    """Encoded tensors outside the device, of which only the bytes are known.

    Attributes:
        most: the most bytes that were outside at a time.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[BlockCode, int]] = {}
        self._next = self._now = self.most = 0

    def put(self, encoded: Encoded) -> Place:
        """Take a tensor."""
        number, self._next = self._next, self._next + 1
        self._entries[number] = (encoded.code, encoded.count)
        self._now += encoded.nbytes
        self.most = max(self.most, self._now)
        return Place(self, number)

    def get(self, number: int) -> Encoded:
        """A tensor of the same size, on the device."""
        code, count = self._entries[number]
        blocks = code.blocks(count)
        codes = torch.empty(blocks * code.block * code.bits // 8, dtype=torch.uint8)
        return Encoded(code, codes, torch.empty(blocks, dtype=torch.bfloat16), count)

    def free(self, number: int) -> None:
        """Forget a tensor."""
        code, count = self._entries.pop(number)
        self._now -= code.nbytes(count)
