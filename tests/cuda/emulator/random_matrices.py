"""Random compressed matrices: any bits are valid codes, so the codes are random bytes."""

from __future__ import annotations

import numpy as np
import torch
from emulation import Emulator

from ciuic_cli.codecs import reference
from ciuic_cli.codecs.packing import PackedMatrix, packed_nbytes, stored_bits
from ciuic_cli.codecs.scales import input_factors
from ciuic_cli.codecs.stack import ExpertStack
from ciuic_cli.codecs.transform import inverse_transform
from ciuic_cli.codecs.widths import BITS
from ciuic_cli.kernels import DeviceMatrix, DeviceStack

ALL_BITS = (4, 0, 2.5, 8, 1.5, 6, 4.5, 1, 3, 5.5, 2, 7, 3.5, 5)
assert sorted(ALL_BITS) == list(BITS)


def packed(
    random: np.random.Generator,
    rows: int,
    cols: int,
    row_bits: tuple[float, ...] = ALL_BITS,
    *,
    L: int = 16,
    seed: int = 0,
    rank: int = 0,
    factor_bits: tuple[float, ...] = (4.5, 3),
    is_sorted: bool = False,
    is_scaled: bool = False,
) -> PackedMatrix:
    """Row groups take `row_bits` in turn, those of the low-rank factors `factor_bits`; scales span a factor of four."""
    groups = -(-rows // 16)
    bits = np.resize(stored_bits(row_bits), groups)
    size = packed_nbytes(rows, cols, bits) - packed_nbytes(rows, cols, 0)
    lowrank = None
    if rank:
        lowrank = (
            packed(random, rank, cols, factor_bits, L=L, seed=seed),
            packed(random, rank, rows, factor_bits, L=L, seed=seed),
        )
    return PackedMatrix(
        rows=rows,
        cols=cols,
        L=L,
        seed=seed,
        base=0.01,
        row_bits=bits,
        row_scale=random.integers(0, 33, rows, dtype=np.uint8),
        codes=random.integers(0, 256, size, dtype=np.uint8),
        lowrank=lowrank,
        row_class=random.integers(0, 16, rows, dtype=np.uint8) if is_sorted else None,
        input_scale=random.integers(100, 156, cols, dtype=np.uint8) if is_scaled else None,
        scale_steps=int(random.integers(16, 272)),
    )


def on_device(emulator: Emulator, matrix: PackedMatrix) -> DeviceMatrix:
    """The blob in guarded memory, and the matrix as the kernels take it."""
    blob = emulator.tensor(torch.frombuffer(bytearray(matrix.to_bytes()), dtype=torch.uint8))
    return guarded_offsets(emulator, DeviceMatrix(matrix, blob))


def stack_on_device(emulator: Emulator, experts: list[PackedMatrix]) -> DeviceStack:
    stack = ExpertStack(tuple(experts))
    blob = emulator.tensor(torch.frombuffer(bytearray(stack.to_bytes()), dtype=torch.uint8))
    made = DeviceStack(stack, blob)
    object.__setattr__(made, "group_offset", emulator.tensor(made.group_offset))
    return made


def guarded_offsets(emulator: Emulator, matrix: DeviceMatrix) -> DeviceMatrix:
    object.__setattr__(matrix, "group_offset", emulator.tensor(matrix.group_offset))
    if matrix.input_factors is not None:
        object.__setattr__(matrix, "input_factors", emulator.tensor(matrix.input_factors))
    for factor in matrix.lowrank or ():
        guarded_offsets(emulator, factor)
    return matrix


def dense(matrix: PackedMatrix) -> torch.Tensor:
    """The matrix in the original basis by the reference decoder, float64 [rows, cols], low-rank part
    included."""
    stored = torch.from_numpy(reference.decode(matrix))
    out = inverse_transform(stored, matrix.cols, matrix.seed).double()
    if matrix.lowrank is not None:
        right, left = matrix.lowrank
        out += dense(left).T @ dense(right)
    if matrix.input_scale is not None:
        out *= input_factors(matrix.input_scale)
    return out


def relative_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm())
