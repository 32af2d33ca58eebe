"""Extreme shapes and values that the reader accepts, through every native function: `shapes.py [--many]`.

Every matrix is written to bytes and read back, as from an artifact. Every array that a kernel reads or writes lies
against a guard page: after its last byte in one round, before its first byte in another. An access one byte outside
ends the process. Results must also be right: decoded weights equal those of codecs/reference.py, products those of the
decoded matrix. Prints the kernels in use, the number of matrices, and a digest of all results, which must be the same
for every instruction set.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import itertools
import mmap
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ciuic_cli.codecs import native, reference
from ciuic_cli.codecs.bits import BITS, bits_of, stored_bits
from ciuic_cli.codecs.header import L_VALUES
from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.sizes import group_offsets
from ciuic_cli.codecs.stack import ExpertStack
from ciuic_cli.codecs.testing import random_matrix
from ciuic_cli.codecs.transform import TILE, log2_block, transform

Array = npt.NDArray[Any]

SHAPES = (
    (1, 1), (1, 17), (15, 1), (16, 16), (17, 15), (33, 48), (1, 1023), (7, 1040), (31, 2064), (65, 272), (130, 96),
)  # fmt: skip
LONG = ((1, 70_001), (4099, 1), (3, 1 << 14), (2000, 33))
ROUNDED = 128
"""Matrices with at most this many rows and columns are also encoded, which is slow."""
BASES = (0.01, 1e-45, float(np.finfo(np.float32).max) / 2.0**16)
"""Scale bases: an ordinary one, the smallest and the largest that are accepted."""
THREADS = (1, 3, 64)
_PAGE = mmap.PAGESIZE
WIDTHS = stored_bits(BITS).tolist()
_NO_ACCESS = 0


class Guarded:
    """Allocates arrays between two guard pages.

    shift: bytes between the first guard page and the array; None: the array ends at the last guard page. A shift
    leaves a gap at the end; another round with None covers that end.
    """

    def __init__(self, shift: int | None) -> None:
        self.shift = shift
        self.kept: list[mmap.mmap] = []
        self.protect = ctypes.CDLL(None, use_errno=True).mprotect
        self.protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """An array between guard pages, all bytes 0xA5."""
        kind = np.dtype(dtype)
        size = int(np.prod(shape)) * kind.itemsize
        room = -(-(size + (self.shift or 0)) // _PAGE) * _PAGE
        memory = mmap.mmap(-1, room + 2 * _PAGE)
        self.kept.append(memory)
        whole = np.frombuffer(memory, np.uint8)
        for page in (0, _PAGE + room):
            if self.protect(whole.ctypes.data + page, _PAGE, _NO_ACCESS) != 0:
                raise OSError(ctypes.get_errno(), "mprotect")
        begin = _PAGE + (room - size if self.shift is None else self.shift)
        part = whole[begin : begin + size]
        part[:] = 0xA5
        return np.ndarray(shape, kind, memory, begin)

    def copy(self, array: Array) -> Array:
        made = self.empty(array.shape, array.dtype)
        made[...] = array
        return made


# --- accepted blobs


def hostile_matrix(
    generator: random.Random, rows: int, cols: int, bits: list[int], rank: int = 0
) -> PackedMatrix:
    """Random codes and scales of any value: no string of bits is refused."""
    random_bytes = np.random.default_rng(generator.getrandbits(32))
    lowrank = None
    if rank:
        lowrank = tuple(
            hostile_matrix(generator, rank, width, [generator.choice(WIDTHS)]) for width in (cols, rows)
        )
    plain = random_matrix(
        rows,
        cols,
        bits_of(np.array(bits, np.uint8)).tolist(),
        rng=random_bytes,
        L=generator.choice(list(L_VALUES)),
        seed=generator.choice((0, 1, 2**32 - 1)),
    )
    header = replace(
        plain.header,
        base=generator.choice(BASES),
        row_scale=random_bytes.choice(np.array([0, 1, 128, 255], np.uint8), rows),
        scale_steps=16,
    )
    return PackedMatrix(header, plain.codes, lowrank)  # type: ignore[arg-type]


def changed(matrix: PackedMatrix, **fields: Any) -> PackedMatrix:
    """The matrix with other fields of its header."""
    return replace(matrix, header=replace(matrix.header, **fields))


def accepted(generator: random.Random, many: bool) -> Iterator[bytes]:
    """Blobs of matrices and of stacks."""
    for rows, cols in (*SHAPES, *(LONG if many else LONG[:2])):
        choices = [[width] for width in WIDTHS] if many else [[generator.choice(WIDTHS[1:])]]
        for bits in (*choices, [0, 8, 2, 0], [3, 5]):
            rank = generator.choice((0, 0, 1, min(rows, cols, 40)))
            matrix = hostile_matrix(generator, rows, cols, bits, rank)
            if generator.randrange(2):
                matrix = changed(matrix, row_class=np.resize(np.array([15, 0, 7], np.uint8), rows))
            if generator.randrange(2):
                matrix = changed(matrix, input_scale=np.resize(np.array([255, 0, 128], np.uint8), cols))
            yield matrix.to_bytes()
    for count in (1, 5):
        experts = [hostile_matrix(generator, 18, 40, [generator.choice(WIDTHS)]) for _ in range(count)]
        yield ExpertStack(tuple(changed(expert, L=16) for expert in experts)).to_bytes()


def matrices(blob: Array) -> list[PackedMatrix]:
    """All matrices in a blob, low-rank factors included; they share the blob's memory."""
    if bytes(blob[:4]) == b"CIUX":
        found = list(ExpertStack.from_buffer(blob, where="stack").experts)
    else:
        found = [PackedMatrix.from_buffer(blob, where="matrix")]
    return [part for matrix in found for part in (matrix, *(matrix.lowrank or ()))]


# --- native functions on one matrix


class Kernels:
    """Calls every native function with guarded arrays and adds their results to a digest."""

    def __init__(self, guarded: Guarded, generator: random.Random, digest: Any) -> None:
        self.guarded, self.random, self.digest = guarded, generator, digest

    def call(self, name: str, *arguments: object) -> None:
        passed = [
            argument.ctypes.data if isinstance(argument, np.ndarray) else argument for argument in arguments
        ]
        status = getattr(native.interface(), name)(*passed)
        assert status == 0, f"{name} refused what the reader accepts: {status}"

    def add_to_digest(self, array: Array) -> None:
        """Add an array to the digest. NaNs of different bits count as equal."""
        values = np.where(np.isnan(array), np.float32(-1.5), array) if array.dtype == np.float32 else array
        self.digest.update(np.ascontiguousarray(values).tobytes())

    def all_on(self, matrix: PackedMatrix) -> None:
        copies = [
            self.guarded.copy(array)
            for array in (matrix.header.group_offset, matrix.header.row_bits, matrix.header.scales)
        ]
        self.packed = (
            matrix.codes,
            *copies,
            matrix.header.rows_padded,
            matrix.header.cols_padded,
            matrix.header.L,
        )
        decoded = self.decode(matrix)
        self.decode_rows(matrix, decoded)
        self.matmul(matrix, decoded)
        if matrix.rows <= ROUNDED and matrix.cols <= ROUNDED:
            self.round(matrix)

    def decode(self, matrix: PackedMatrix) -> Array:
        rows, cols = matrix.rows, matrix.header.cols_padded
        whole = self.guarded.empty((rows, cols), np.float32)
        self.call("ciuic_decode", *self.packed, 0, rows, whole, 0, self.random.choice(THREADS))
        if rows * cols <= 1 << 14:
            with np.errstate(over="ignore"):
                np.testing.assert_array_equal(whole, reference.decode(matrix)[:rows])
        begin = self.random.randrange(rows)
        for first, last in (
            (0, 0),
            (rows, rows),
            (begin, self.random.randint(begin, rows)),
            (rows - 1, rows),
        ):
            part = self.guarded.empty((last - first, cols), np.float32)
            self.call("ciuic_decode", *self.packed, first, last, part, 0, self.random.choice(THREADS))
            np.testing.assert_array_equal(part, whole[first:last])
            half = self.guarded.empty((last - first, cols), np.uint16)
            self.call("ciuic_decode", *self.packed, first, last, half, 1, self.random.choice(THREADS))
            rounded = torch.from_numpy(part.copy()).to(torch.bfloat16).view(torch.int16).numpy()
            np.testing.assert_array_equal(half.view(np.int16), rounded)
        self.add_to_digest(whole)
        return whole

    def decode_rows(self, matrix: PackedMatrix, decoded: Array) -> None:
        for count in (0, 1, 9):
            chosen = [
                self.random.choice((0, matrix.rows - 1, self.random.randrange(matrix.rows)))
                for _ in range(count)
            ]
            index = self.guarded.copy(np.array(chosen, np.int64))
            out = self.guarded.empty((count, matrix.header.cols_padded), np.float32)
            self.call("ciuic_decode_rows", *self.packed, index, count, out, self.random.choice(THREADS))
            np.testing.assert_array_equal(out, decoded[chosen])

    def matmul(self, matrix: PackedMatrix, decoded: Array) -> None:
        numbers = np.random.default_rng(1)
        for batch, half_in, half_out, exact in itertools.product((1, 2, 5, 9), (0, 1), (0, 1), (0, 1)):
            kind = self.random.choice(("gaussian", "gaussian", "zero", "largest", "smallest", "mixed"))
            x = torch.from_numpy(numbers.standard_normal((batch, matrix.cols)).astype(np.float32))
            x = {
                "gaussian": x,
                "zero": 0 * x,
                "largest": torch.finfo(torch.float32).max * x.sign(),
                "smallest": 1e-45 * x.sign(),
                "mixed": torch.where(x > 1, torch.inf, torch.where(x < -1, torch.nan, x)),
            }[kind]
            given = x.to(torch.bfloat16).view(torch.int16).numpy() if half_in else x.numpy()
            y = self.guarded.empty((batch, matrix.rows), np.uint16 if half_out else np.float32)
            order = numbers.permutation(matrix.rows).astype(np.int32) if self.random.random() < 0.5 else None
            order_in_place = None if order is None else self.guarded.copy(order)
            arrays, (rows, cols, L) = self.packed[:4], self.packed[4:]
            factor = native.CiuicMatrix(
                *(array.ctypes.data for array in arrays),
                None if order_in_place is None else order_in_place.ctypes.data, None, None,
                rows, cols, matrix.rows, matrix.cols, L, matrix.header.log2_block, matrix.header.seed,
            )  # fmt: skip
            self.call(
                "ciuic_matmul", ctypes.addressof(factor), self.guarded.copy(given), half_in, batch, y, half_out,
                exact, self.random.choice(THREADS),
            )  # fmt: skip
            stored = y if order is None else y[:, order]
            signed = torch.from_numpy(stored.view(np.int16) if half_out else stored)
            found = signed.view(torch.bfloat16).float() if half_out else signed
            self.add_to_digest(found.numpy())
            if kind == "gaussian" and matrix.header.base == np.float32(BASES[0]):
                inputs = transform(
                    x.to(torch.bfloat16).float() if half_in else x, matrix.header.seed
                ).double()
                weights = torch.from_numpy(decoded).double()
                limit = (2e-6 if exact else 3e-2) + (4e-3 if half_out else 0)
                size = inputs.norm(dim=1, keepdim=True) * weights.norm(dim=1)
                assert bool(((found.double() - inputs @ weights.T).abs() <= limit * size).all()), (
                    batch,
                    exact,
                )
            elif kind == "zero":
                assert not found.any()

    def round(self, matrix: PackedMatrix) -> None:
        rows, cols = matrix.header.rows_padded, matrix.header.cols_padded
        numbers = np.random.default_rng(2)
        weight, a, b, direction, pull = (
            self.guarded.copy(numbers.standard_normal(shape).astype(np.float32) * factor)
            for shape, factor in (
                ((rows, cols), 1.0), ((cols, cols), 0.05), ((rows, rows), 0.05), *[((rows, cols), 0.05)] * 2
            )
        )  # fmt: skip
        inputs = self.random.choice(((None, None, None), (a, None, None), (a, direction, pull)))
        scale = np.where(np.arange(rows) < matrix.rows, self.random.choice((1.0, 1e-30, 1e30)), 0.0)
        scales, bits = self.guarded.copy(scale.astype(np.float32)), self.guarded.copy(matrix.header.row_bits)
        offsets = self.guarded.copy(group_offsets(matrix.header.row_bits, cols))
        codes = self.guarded.empty(matrix.codes.shape, np.uint8)
        decoded = self.guarded.empty((rows, cols), np.float32)
        L, progress = self.random.choice(list(L_VALUES)[:2]), self.guarded.copy(np.zeros(1, np.int64))
        self.call(
            "ciuic_round", weight, rows, cols, inputs[0], self.random.choice((b, None)), *inputs[1:], scales, bits,
             L, self.random.choice(THREADS), codes, offsets, decoded, progress,
        )  # fmt: skip
        assert progress[0] == rows * cols // TILE**2
        again = np.empty((rows, cols), np.float32)
        self.call("ciuic_decode", codes, offsets, bits, scales, rows, cols, L, 0, rows, again, 0, 1)
        np.testing.assert_array_equal(again[: matrix.rows], decoded[: matrix.rows])
        self.add_to_digest(decoded)

    def hadamard(self) -> None:
        for cols in (16, 48, 1024, 1040, 3072):
            for rows in (0, 1, 7):
                x = np.random.default_rng(cols).standard_normal((rows, cols)).astype(np.float32)
                y = self.guarded.copy(x)
                for inverse in (0, 1):
                    self.call(
                        "ciuic_hadamard", y, 0, rows, cols, log2_block(cols), 2**32 - 1, inverse,
                        self.random.choice(THREADS),
                    )  # fmt: skip
                np.testing.assert_allclose(y, x, rtol=1e-4, atol=1e-5)
                half = self.guarded.copy((x.view(np.uint32) >> 16).astype(np.uint16))
                for inverse in (0, 1):
                    self.call(
                        "ciuic_hadamard", half, 1, rows, cols, log2_block(cols), 2**32 - 1, inverse,
                        self.random.choice(THREADS),
                    )  # fmt: skip
                back = (half.astype(np.uint32) << 16).view(np.float32)
                np.testing.assert_allclose(back, x, rtol=0.02, atol=0.03)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--many", action="store_true", help="every width for every shape")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    digest = hashlib.sha256()
    count = 0
    for of_blob, of_arrays in ((None, None), (0, 0), (1, 0)):  # a blob in a file may begin at an odd address
        generator = random.Random(options.seed)
        for blob in accepted(generator, options.many):
            kernels = Kernels(Guarded(of_arrays), generator, digest)
            for matrix in matrices(Guarded(of_blob).copy(np.frombuffer(blob, np.uint8))):
                kernels.all_on(matrix)
                count += 1
        Kernels(Guarded(of_arrays), generator, digest).hadamard()
    print(native.cpu_kernels(), count, digest.hexdigest())


if __name__ == "__main__":
    main()
