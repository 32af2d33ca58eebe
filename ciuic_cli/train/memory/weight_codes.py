"""The codes of one weight while it is trained: all rows in 8 bits, or some groups of 16 rows in 4."""

from __future__ import annotations

import torch

from ciuic_cli.codecs.blockcode.code import BlockCode, Encoded, decode, encode

WEIGHT_CODE = BlockCode(bits=8, block=64, stochastic=True)
"""The code of a weight: 1.03 bytes per parameter."""

NARROW_CODE = BlockCode(bits=4, block=64, stochastic=True)
"""The code of rows that matter less: 0.53 bytes per parameter."""

ROWS = 16
"""Rows of a weight that have the same bits. Chosen: as in the budget of compression."""


class WeightCodes:
    """Codes of a tensor, by its rows: all of its dimensions but the first are columns.

    wide: bool (groups,), whether a group of 16 rows has 8 bits; None: all have.
    """

    def __init__(self, shape: torch.Size, wide: torch.Tensor | None = None) -> None:
        self.shape, self.wide = shape, wide
        self._parts: list[Encoded] = []

    def _rows(self) -> list[tuple[BlockCode, torch.Tensor | None]]:
        """Each code in use, and its rows; None: all."""
        if self.wide is None:
            return [(WEIGHT_CODE, None)]
        by_row = self.wide.repeat_interleave(ROWS)[: self.shape[0]]
        chosen = [(WEIGHT_CODE, by_row.nonzero()[:, 0]), (NARROW_CODE, (~by_row).nonzero()[:, 0])]
        return [(code, rows) for code, rows in chosen if len(rows)]

    def store(self, values: torch.Tensor, seed: int) -> None:
        """Encode `values`, of the shape; `seed`: of stochastic rounding."""
        table = values.view(self.shape[0], -1)
        self._parts = [
            encode(values if rows is None else table[rows.to(values.device)], code, seed=seed)
            for code, rows in self._rows()
        ]

    def load(self, out: torch.Tensor) -> torch.Tensor:
        """Decode into `out`, contiguous and of the shape; returns it."""
        table = out.view(self.shape[0], -1)
        for (_, rows), part in zip(self._rows(), self._parts, strict=True):
            if rows is None:
                decode(part, out=out)
            else:
                table[rows.to(out.device)] = decode(part, out.dtype).view(len(rows), -1)
        return out

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(part.nbytes for part in self._parts)

    def state(self) -> dict[str, object]:
        """The codes as plain tensors, for `restore`."""
        return {"wide": self.wide, "parts": [(part.codes, part.scales, part.count) for part in self._parts]}

    def restore(self, state: dict[str, object], device: torch.device) -> None:
        """Continue from a `state()` of the same weight."""
        self.wide = state["wide"]  # type: ignore[assignment]
        parts: list[tuple[torch.Tensor, torch.Tensor, int]] = state["parts"]  # type: ignore[assignment]
        self._parts = [
            Encoded(code, codes.to(device), scales.to(device), count)
            for (code, _), (codes, scales, count) in zip(self._rows(), parts, strict=True)
        ]
