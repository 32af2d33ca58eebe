"""Two-sided rounding in fronts of tiles that do not depend on each other: on a GPU, or on any device of torch.

The formulas are those of `codecs.trellis.round_matrix`, whose native call rounds tile by tile. Here tile (I, J) belongs
to the front I + J, counted from the last row and column. All tiles of a front are computed at once: their feedback by
batched products of torch, their codes by a `Search`. Without output feedback rows do not wait for each other, and a
front is a column of tiles; without input feedback it is a row of tiles.

Memory of one matrix (m, n), in float32 numbers: the weight, its error, and with output feedback the propagated error,
m n each; both feedback matrices in the order in which they are read, n² and m²; besides them, what `prepare` holds, and
the scratch memory of the search (`encoder.SCRATCH_BYTES` at most, 0.6 GB at 4 bits on a GPU of 132 multiprocessors).
`round_bytes` counts it.

Occupancy: with feedback on both sides a matrix of I x J tiles has I + J - 1 fronts of at most min(I, J) tiles, on
average I J / (I + J - 1): 163 tiles for 4096 x 7168, 26 for 576 x 1536. The search needs two tiles for each
multiprocessor (264 on an H100), so these two keep 62 % and 10 % of it busy. `matrices_in_flight` says how many
matrices, each with a stream of its own, fill the rest. Measured: docs/experiments/runtime/gpu-other-kernels.md.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ciuic_cli.codecs import trellis
from ciuic_cli.codecs.bits import bits_of, stored_bits, tile_nbytes
from ciuic_cli.codecs.sizes import codes_nbytes, group_offsets
from ciuic_cli.codecs.transform import TILE
from ciuic_cli.errors import UsageError
from ciuic_cli.integers import ceil_div
from ciuic_cli.kernels.encoder import SCRATCH_BYTES, TILES_PER_MULTIPROCESSOR, encode

Search = Callable[[torch.Tensor, float, int], tuple[torch.Tensor, torch.Tensor]]
"""Finds the codes of a front's tiles: (targets float32 [tiles, 256] in units of the row scales, bits per weight, L) to
(codes uint8 [tiles, 32 * bits], decoded float32 [tiles, 256] in the same units). `encoder.encode` searches on a GPU,
`native_search` on the CPU."""
MOST_IN_FLIGHT = 16
"""Most matrices that are coded at a time: each has a thread, which the interpreter's lock makes wait for the others
(chosen, not tuned)."""


def native_search(targets: torch.Tensor, bits: float, L: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The search of the native library, as a `Search`."""
    tiles = len(targets)
    matrix = targets.reshape(tiles, TILE, TILE).transpose(0, 1).reshape(TILE, TILE * tiles)
    codes, decoded = trellis.round_matrix(matrix, np.ones(TILE, np.float32), [stored_bits(bits)], L=L)
    decoded = decoded.reshape(TILE, tiles, TILE).transpose(0, 1).reshape(tiles, TILE * TILE)
    return torch.from_numpy(codes).reshape(tiles, -1), decoded


class _Front(NamedTuple):
    """Tiles (group, block) of a front. Groups and blocks count up together, or one of the two slices has length 1.

    Blocks are numbered from the last one, which is rounded first.
    """

    groups: slice
    blocks: slice


def _fronts(groups: int, blocks: int, feeds_inputs: bool, feeds_outputs: bool) -> Iterator[_Front]:
    """The fronts in the order of rounding."""
    if not feeds_inputs:
        for group in reversed(range(groups)):
            yield _Front(slice(group, group + 1), slice(0, blocks))
    elif not feeds_outputs:
        for block in range(blocks):
            yield _Front(slice(0, groups), slice(block, block + 1))
    else:
        for number in range(groups + blocks - 1):  # block - group = number - (groups - 1)
            shift = number - (groups - 1)
            begin, end = max(0, -shift), min(groups, blocks - shift)
            yield _Front(slice(begin, end), slice(begin + shift, end + shift))


class _Width(NamedTuple):
    """The row groups with one number of bits.

    groups: their numbers, ascending; on_device: the same as int64 tensor. codes: uint8 (groups, blocks, bytes of a
    tile).
    """

    bits: float
    groups: list[int]
    on_device: torch.Tensor
    codes: torch.Tensor


def round_matrix(
    weight: torch.Tensor,
    scale: NDArray[np.float32],
    row_bits: NDArray[np.uint8],
    *,
    L: int,
    input_feedback: torch.Tensor | None = None,
    output_feedback: torch.Tensor | None = None,
    row_feedback: tuple[torch.Tensor, torch.Tensor] | None = None,
    search: Search = encode,
) -> tuple[NDArray[np.uint8], torch.Tensor]:
    """Rounds a matrix on the device where it is; arguments and result as `codecs.trellis.round_matrix`.

    A padding row, whose scale is 0, is searched with targets of 0. Codes can differ from the native library's: sums are
    added in another order, and searches differ among paths of nearly equal error.

    Args:
        search: finds the codes of a front, on this device.

    Raises:
        UsageError: shapes do not fit, or weights or feedback contain NaN or infinite values.
        EnvironmentFault: the search cannot be compiled or launched.
    """
    rows, cols = weight.shape
    if rows % TILE or cols % TILE or scale.shape != (rows,) or row_bits.shape != (rows // TILE,):
        raise UsageError(
            f"cannot round a {rows} x {cols} matrix with {scale.shape} scales and {row_bits.shape} row bits: "
            "rows and columns must be multiples of 16, with one scale per row and one bit width per 16 rows"
        )
    rounding = _Rounding(weight, scale, row_bits, L, input_feedback, output_feedback, row_feedback, search)
    for front in _fronts(*rounding.tiles, input_feedback is not None, output_feedback is not None):
        rounding.round(front)
    return rounding.codes(), rounding.decoded()


class _Rounding:
    """The state of one matrix between its fronts. Blocks of columns are kept in the order of rounding."""

    def __init__(
        self,
        weight: torch.Tensor,
        scale: NDArray[np.float32],
        row_bits: NDArray[np.uint8],
        L: int,
        input_feedback: torch.Tensor | None,
        output_feedback: torch.Tensor | None,
        row_feedback: tuple[torch.Tensor, torch.Tensor] | None,
        search: Search,
    ) -> None:
        device = weight.device
        self.tiles = groups, blocks = len(weight) // TILE, weight.shape[1] // TILE
        self.row_bits, self.L, self.search = row_bits, L, search
        self.weight = _tiled(weight)
        self.error = torch.zeros_like(self.weight)
        scales = torch.from_numpy(np.ascontiguousarray(scale)).to(device).reshape(groups, TILE, 1)
        self.scale = scales
        self.to_code = torch.where(scales > 0, 1.0 / scales, 0.0)
        pruned = torch.from_numpy(row_bits == 0).to(device).reshape(groups, 1, 1)
        self.counts = ((scales > 0) | pruned).float()  # whether a row's error counts: not that of padding
        self.has_padding = bool((self.counts == 0).any())
        self.inputs = self.outputs = self.propagated = None
        if input_feedback is not None:
            # [block][column of a later block][column]: the panel by which errors reach the block
            panels = input_feedback.reshape(blocks, TILE, blocks, TILE).flip(0, 2)
            self.inputs = panels.permute(2, 0, 1, 3).reshape(blocks, blocks * TILE, TILE).contiguous()
        if output_feedback is not None:
            self.outputs = output_feedback.T.reshape(groups, TILE, groups * TILE)
            self.propagated = weight.new_zeros(blocks, groups * TILE, TILE)
        direction, pull = row_feedback or (None, None)
        self.direction = None if direction is None else _tiled(direction)
        self.pull = None if pull is None else _tiled(pull)
        self.along = weight.new_zeros(groups, TILE, 1)  # error along each row's direction
        self.block_numbers = torch.arange(blocks, device=device)
        self.widths = []
        for stored in np.unique(row_bits):
            chosen = np.flatnonzero(row_bits == stored)
            nbytes = int(tile_nbytes(stored))
            codes = torch.zeros(len(chosen), blocks, nbytes, dtype=torch.uint8, device=device)
            width = _Width(
                float(bits_of(stored)), chosen.tolist(), torch.from_numpy(chosen).to(device), codes
            )
            self.widths.append(width)

    def round(self, front: _Front) -> None:
        """Round the tiles of a front and keep what later fronts need of them.

        Tiles are read and written through views: on a GPU each operation of torch costs more than its arithmetic.
        """
        groups = front.groups
        weight, error = _along(self.weight, front), _along(self.error, front)
        fed_in: torch.Tensor | float = 0.0
        if self.inputs is not None and front.blocks.stop > 1:
            done = TILE * (front.blocks.stop - 1)
            fed_in = _products(self.error.flatten(2)[groups, :, :done], self.inputs[front.blocks, :done])
        target = weight + fed_in
        if self.outputs is not None and self.propagated is not None:
            below = TILE * (groups.start + 1)
            target += _products(self.outputs[groups, :, below:], self.propagated[front.blocks, below:])
        if self.pull is not None:
            target += self.along[groups] * _along(self.pull, front)
        decoded = self._searched(front, target * self.to_code[groups]) * self.scale[groups]
        torch.sub(weight, decoded, out=error)
        if self.has_padding:
            error *= self.counts[groups]
        propagated = error if isinstance(fed_in, float) else error + fed_in
        if self.propagated is not None:
            tiles = self.propagated.unflatten(1, (-1, TILE)).transpose(0, 1)  # (groups, blocks, 16, 16)
            _along(tiles.transpose(1, 2), front).copy_(propagated)
        if self.direction is not None:
            self.along[groups] += (propagated * _along(self.direction, front)).sum(2, keepdim=True)

    def _searched(self, front: _Front, targets: torch.Tensor) -> torch.Tensor:
        """The decoded tiles of targets (tiles, 16, 16), both in units of the row scales; keeps their codes."""
        begin, one_group = front.groups.start, front.groups.stop - front.groups.start == 1
        decoded: torch.Tensor | None = None
        for width in self.widths:
            first, last = (bisect_left(width.groups, edge) for edge in (begin, front.groups.stop))
            if width.bits == 0 or first == last:
                continue
            if one_group or last - first == len(targets):  # all tiles of the front
                codes, found = self.search(targets.reshape(-1, TILE * TILE).contiguous(), width.bits, self.L)
                front_of_width = _Front(slice(first, last), front.blocks)
                _along(width.codes.unsqueeze(1), front_of_width).copy_(codes.unsqueeze(1))
                return found.reshape(-1, TILE, TILE)
            places = width.on_device[first:last] - begin  # of its tiles in the front
            blocks = self.block_numbers[front.blocks]
            codes, found = self.search(targets[places].reshape(-1, TILE * TILE), width.bits, self.L)
            numbers = torch.arange(first, last, device=targets.device)
            width.codes[numbers, blocks[places] if len(blocks) > 1 else blocks] = codes
            decoded = torch.zeros_like(targets) if decoded is None else decoded
            decoded[places] = found.reshape(-1, TILE, TILE)
        return torch.zeros_like(targets) if decoded is None else decoded

    def codes(self) -> NDArray[np.uint8]:
        """uint8 [codes_nbytes], tiles in natural order. Raises UsageError if a target was NaN or infinite."""
        if not bool(torch.isfinite(self.error).all()):
            raise UsageError("the matrix, its scales or its error feedback contain NaN or infinite values")
        cols = TILE * self.tiles[1]
        codes = np.zeros(codes_nbytes(self.row_bits, cols), np.uint8)
        offsets = group_offsets(self.row_bits, cols)
        for width in self.widths:
            rows = width.codes.flip(1).flatten(1).cpu().numpy()
            for group, row in zip(width.groups, rows, strict=True):
                codes[offsets[group] : offsets[group] + len(row)] = row
        return codes

    def decoded(self) -> torch.Tensor:
        """float32 [rows_padded, cols_padded]; padding rows are as they were given."""
        return (self.weight - self.error).flip(2).reshape(TILE * self.tiles[0], TILE * self.tiles[1])


def _tiled(matrix: torch.Tensor) -> torch.Tensor:
    """(m, n) to (m / 16, 16, n / 16, 16), the blocks of columns in the order of rounding."""
    rows, cols = matrix.shape
    return matrix.reshape(rows // TILE, TILE, cols // TILE, TILE).flip(2)


def _along(tiled: torch.Tensor, front: _Front) -> torch.Tensor:
    """The tiles of a front in an array (groups, height, blocks, width), as a view (tiles, height, width)."""
    group, row, block, column = tiled.stride()
    steps_group = front.groups.stop - front.groups.start > 1
    steps_block = front.blocks.stop - front.blocks.start > 1
    return tiled.as_strided(
        (
            max(front.groups.stop - front.groups.start, front.blocks.stop - front.blocks.start),
            tiled.shape[1],
            tiled.shape[3],
        ),
        (group * steps_group + block * steps_block, row, column),
        tiled.storage_offset() + group * front.groups.start + block * front.blocks.start,
    )


def _products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left (a, 16, k) times right (b, k, 16), (max(a, b), 16, 16). A single factor multiplies all of the others."""
    if len(left) == len(right):
        return left @ right
    return left @ right[0] if len(right) == 1 else left[0] @ right


# --- memory and occupancy


def tiles_per_front(rows: int, cols: int, *, two_sided: bool) -> float:
    """Mean number of tiles in a front of a matrix with feedback along its inputs, and `two_sided` along its outputs."""
    groups, blocks = ceil_div(rows, TILE), ceil_div(cols, TILE)
    return groups * blocks / (groups + blocks - 1) if two_sided else float(groups)


def occupancy(rows: int, cols: int, multiprocessors: int, *, two_sided: bool) -> float:
    """Share of the GPU's places for tiles that the fronts of one matrix take on average."""
    places = TILES_PER_MULTIPROCESSOR * multiprocessors
    return min(1.0, tiles_per_front(rows, cols, two_sided=two_sided) / places)


def round_bytes(rows: int, cols: int, *, two_sided: bool) -> int:
    """Bytes of rounding a matrix beside those of preparing it."""
    squares = cols**2 + (rows**2 if two_sided else 0)
    return 4 * ((3 if two_sided else 2) * rows * cols + squares) + SCRATCH_BYTES


def matrices_in_flight(
    rows: int, cols: int, *, two_sided: bool, multiprocessors: int, working_bytes: int, free_bytes: int
) -> int:
    """How many matrices of this shape to code at a time: as many as fill the GPU, if its memory has room for them.

    Args:
        working_bytes: of preparing one matrix. free_bytes: of the GPU's memory.
    """
    wanted = ceil_div(1000, max(1, int(1000 * occupancy(rows, cols, multiprocessors, two_sided=two_sided))))
    room = free_bytes // (working_bytes + round_bytes(rows, cols, two_sided=two_sided))
    return max(1, min(wanted, room, MOST_IN_FLIGHT))
