"""Checks every CUDA kernel against float64 on random inputs, with poisoned outputs between guard bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from ciuic_cli import kernels
from ciuic_cli.codecs import reference
from ciuic_cli.codecs.packing import PackedMatrix, packed_nbytes, stored_bits
from ciuic_cli.codecs.rate_distortion import MSE_BY_L, SCALE_BY_L
from ciuic_cli.codecs.scales import input_factors
from ciuic_cli.codecs.stack import ExpertStack
from ciuic_cli.codecs.transform import inverse_transform
from ciuic_cli.codecs.widths import BITS
from ciuic_cli.kernels import sources
from ciuic_cli.kernels.launcher import LAUNCHERS, Launcher, Limits, launcher_for

BOUND = 1e-2
"""Default bound for relative errors: several times the rounding of bfloat16. Chosen, not tuned."""
_MIXED = (2, 0, 8, 3, 5.5, 6, 1, 2.5, 7, 1.5, 5, 3.5, 4.5)
_GUARD = 4096  # guard bytes on each side of a buffer
_PATTERN = 0xFF  # a NaN in every floating type


@dataclass(frozen=True)
class Check:
    """One check of a kernel: what it ran on, its relative error, and the bound."""

    name: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.error < self.bound  # false for NaN


class GuardedLauncher:
    """A launcher whose buffers start as NaN and lie between guard bytes, which `verify` checks."""

    def __init__(self, inner: Launcher, device: torch.device) -> None:
        self.inner = inner
        self.device = device
        self.limits: Limits = inner.limits
        self.buffers: list[torch.Tensor] = []
        self.launched: set[str] = set()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nbytes = int(torch.Size(shape).numel()) * dtype.itemsize
        whole = torch.full((nbytes + 2 * _GUARD,), _PATTERN, dtype=torch.uint8, device=self.device)
        self.buffers.append(whole)
        return whole[_GUARD : _GUARD + nbytes].view(dtype).reshape(shape)

    def launch(
        self,
        kernel: str,
        grid: tuple[int, int],
        threads: int,
        shared_bytes: int,
        parameters: ctypes.Structure,
        L: int,
    ) -> None:
        self.launched.add(kernel)
        self.inner.launch(kernel, grid, threads, shared_bytes, parameters, L)

    def verify(self) -> bool:
        """Whether all guard bytes are intact. Forgets the buffers."""
        intact = all(
            bool((whole[:_GUARD] == _PATTERN).all() and (whole[-_GUARD:] == _PATTERN).all())
            for whole in self.buffers
        )
        self.buffers.clear()
        return intact


@contextmanager
def guarded(device: torch.device) -> Iterator[GuardedLauncher]:
    """Replaces the device's launcher by a GuardedLauncher."""
    original = launcher_for(device)
    LAUNCHERS[device] = guarding = GuardedLauncher(original, device)
    try:
        yield guarding
    finally:
        LAUNCHERS[device] = original


def random_matrix(
    random: np.random.Generator,
    rows: int,
    cols: int,
    row_bits: tuple[float, ...],
    rank: int = 0,
    L: int = 16,
    *,
    is_scaled: bool = False,
) -> PackedMatrix:
    """Random codes (any bits are valid); the row groups take `row_bits` cyclically."""
    bits = np.resize(stored_bits(row_bits), -(-rows // 16))
    size = packed_nbytes(rows, cols, bits) - packed_nbytes(rows, cols, 0)
    lowrank = None
    if rank:
        lowrank = (
            random_matrix(random, rank, cols, (5.5,), L=L),
            random_matrix(random, rank, rows, (6, 3.5), L=L),
        )
    return PackedMatrix(
        rows=rows,
        cols=cols,
        L=L,
        seed=0,
        base=0.01,
        row_bits=bits,
        row_scale=random.integers(0, 33, rows, dtype=np.uint8),
        scale_steps=int(random.integers(16, 272)),
        codes=random.integers(0, 256, size, dtype=np.uint8),
        lowrank=lowrank,
        input_scale=random.integers(100, 156, cols, dtype=np.uint8) if is_scaled else None,
    )


def blob_of(packed: PackedMatrix | ExpertStack, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(packed.to_bytes()), dtype=torch.uint8).to(device).clone()


def dense(packed: PackedMatrix) -> torch.Tensor:
    """The matrix in the original basis by the reference decoder, float64 [rows, cols], low-rank part included."""
    out = inverse_transform(torch.from_numpy(reference.decode(packed)), packed.cols, packed.seed).double()
    if packed.lowrank is not None:
        right, left = packed.lowrank
        out += dense(left).T @ dense(right)
    if packed.input_scale is not None:
        out *= input_factors(packed.input_scale)
    return out


def relative_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    return float((value.double().cpu() - exact).norm() / exact.norm())


def run(device: torch.device, *, small: bool = False, seed: int = 0) -> list[Check]:
    """All checks. `small` limits the sizes, for compute-sanitizer or an emulated device."""
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    checks: list[Check] = []
    with guarded(device) as launcher:

        def record(name: str, error: float, bound: float = BOUND) -> None:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            intact = launcher.verify()
            checks.append(
                Check(name if intact else f"{name}: wrote outside", error if intact else float("nan"), bound)
            )

        _rows(device, random, record, small)
        _products(device, random, record, small)
        _experts(device, random, record, small)
        _encoder(device, record, small)
        missing = {name for names in sources.UNITS.values() for name in names} - launcher.launched
        if not small and missing:
            checks.append(Check(f"never launched: {', '.join(sorted(missing))}", float("nan"), BOUND))
    return checks


def _rows(device, random, record, small: bool) -> None:
    for L in (16, 13):
        for bits in BITS:
            packed = random_matrix(random, 45, 208, (bits, 4), L=L)
            matrix = kernels.DeviceMatrix(packed, blob_of(packed, device))
            exact = torch.from_numpy(reference.decode(packed)).double()
            record(f"decode {bits:g} bits L={L}", relative_error(kernels.decode(matrix), exact), 1e-6)
            for dtype in (torch.bfloat16, torch.float16):
                error = relative_error(kernels.decode(matrix, dtype=dtype), exact)
                record(f"decode {bits:g} bits L={L} {dtype}", error)
    for cols in (100, 1040) if small else (100, 576, 4096, 7168):
        packed = random_matrix(random, 77, cols, (4, 2.5, 8), is_scaled=True)
        matrix = kernels.DeviceMatrix(packed, blob_of(packed, device))
        tokens = torch.from_numpy(random.integers(0, 77, 9)).to(device)
        rows = kernels.embedding(matrix, tokens, torch.bfloat16)
        record(f"embedding {cols}", relative_error(rows, dense(packed)[tokens.cpu()]))


def _products(device, random, record, small: bool) -> None:
    batches = (1, 4, 5, 8, 16, 32, 33)
    shapes = [(45, 208), (33, 1100)] if small else [(45, 208), (1030, 4096), (576, 1536), (333, 14336)]
    for rows, cols in shapes:
        for row_bits in ((4,), _MIXED):
            mixed = row_bits == _MIXED
            packed = random_matrix(random, rows, cols, row_bits, rank=20 if mixed else 0, is_scaled=mixed)
            matrix = kernels.DeviceMatrix(packed, blob_of(packed, device))
            exact = dense(packed)
            for batch in batches:
                for dtype in (torch.bfloat16,) if small else (torch.bfloat16, torch.float16):
                    x = torch.randn(batch, cols).to(dtype)
                    (y,) = kernels.linear([matrix], x.to(device))
                    record(
                        f"linear {rows}x{cols} {row_bits} x{batch} {dtype}",
                        relative_error(y, x.double() @ exact.T),
                    )
    packed_parts = [random_matrix(random, rows, 208, (4, 3)) for rows in (45, 16, 100)]
    parts = [kernels.DeviceMatrix(packed, blob_of(packed, device)) for packed in packed_parts]
    x = torch.randn(3, 208)
    for packed, y in zip(packed_parts, kernels.linear(parts, x.to(device)), strict=True):
        record(f"linear, part of {packed.rows} rows", relative_error(y, x.double() @ dense(packed).T), 1e-3)
    if not small:  # large enough for two row groups per block on any GPU
        packed = random_matrix(random, 16384, 208, (4, 2))
        matrix, exact = kernels.DeviceMatrix(packed, blob_of(packed, device)), dense(packed)
        for batch in batches:
            x = torch.randn(batch, 208)
            (y,) = kernels.linear([matrix], x.to(device))
            record(f"linear 16384x208 x{batch}", relative_error(y, x.double() @ exact.T))


def _experts(device, random, record, small: bool) -> None:
    shape, count = ((50, 80), 5) if small else ((512, 1024), 16)
    packed = ExpertStack(
        tuple(random_matrix(random, *shape, (0,) if index == 2 else (4, 2.5, 3)) for index in range(count))
    )
    stack = kernels.DeviceStack(packed, blob_of(packed, device))
    matrices = torch.stack([dense(expert) for expert in packed.experts])
    for tokens, k in ((1, 4), (12, 4), (40, 4), (300, 2)):
        x, ids = torch.randn(tokens, shape[1]), torch.randint(0, count, (tokens, k))
        exact = torch.einsum("tkrc,tc->tkr", matrices[ids], x.double())
        y = kernels.experts(stack, x.bfloat16().to(device), ids.to(device))
        record(f"experts {tokens} tokens x {k}", relative_error(y, exact))


def _encoder(device, record, small: bool) -> None:
    for bits in BITS[1:]:
        L = 13 if small else 16
        tiles = 2 if small else 64
        # Clamped, because in few tiles outliers beyond the code's range would dominate the error.
        targets = torch.randn(tiles, 256).clamp(-3.0, 3.0) / SCALE_BY_L[L][bits]
        codes, decoded = kernels.encode(targets.to(device), bits, L)
        packed = PackedMatrix(
            rows=16,
            cols=16 * tiles,
            L=L,
            seed=0,
            base=1.0,
            row_bits=stored_bits([bits]),
            row_scale=np.zeros(16, dtype=np.uint8),
            codes=codes.reshape(-1).cpu().numpy().copy(),
        )
        stored = torch.from_numpy(reference.decode(packed)).reshape(16, tiles, 16)
        stored = stored.transpose(0, 1).reshape(tiles, 256).double()
        record(f"encode {bits:g} bits: codes are what was decoded", relative_error(decoded, stored), 1e-6)
        # Root mean squared error over the native encoder's on Gaussian weights.
        error = relative_error(decoded, targets.double()) * 2.0**bits / MSE_BY_L[L][bits] ** 0.5
        record(f"encode {bits:g} bits: error over the native encoder's", error, 1.1)
