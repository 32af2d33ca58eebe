"""Checks every CUDA kernel against float64 on random inputs, with poisoned outputs between guard bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from ciuic_cli import kernels
from ciuic_cli.codecs import reference
from ciuic_cli.codecs.bits import BITS
from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.rate_distortion import MSE_BY_L, SCALE_BY_L
from ciuic_cli.codecs.stack import ExpertStack
from ciuic_cli.codecs.testing import (
    MIXED_BITS,
    blob_of,
    exact_stored,
    random_matrix,
    relative_error,
    tiles_as_matrix,
)
from ciuic_cli.kernels import sources
from ciuic_cli.kernels.launcher import LAUNCHERS, Launch, Launcher, Limits, launcher_for

BOUND = 1e-2
"""Default bound for relative errors: several times the rounding of bfloat16. Chosen, not tuned."""
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

    def launch(self, launch: Launch) -> None:
        self.launched.add(launch.kernel)
        self.inner.launch(launch)

    def verify(self) -> bool:
        """Check that all guard bytes are intact, and forget the buffers. Returns False if one has changed."""
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


def on_device(packed: PackedMatrix, device: torch.device) -> kernels.DeviceMatrix:
    return kernels.DeviceMatrix.on_device(packed.header, blob_on(packed, device))


def blob_on(packed: PackedMatrix | ExpertStack, device: torch.device) -> torch.Tensor:
    """The blob on a device, in memory that torch has aligned for the kernels."""
    return blob_of(packed).to(device).clone()


def run(device: torch.device, *, small: bool = False, seed: int = 0) -> list[Check]:
    """All checks. `small` limits the sizes, for compute-sanitizer or an emulated device."""
    rng = np.random.default_rng(seed)
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

        _rows(device, rng, record, small)
        _products(device, rng, record, small)
        _experts(device, rng, record, small)
        _encoder(device, record, small)
        missing = {name for names in sources.UNITS.values() for name in names} - launcher.launched
        if not small and missing:
            checks.append(Check(f"never launched: {', '.join(sorted(missing))}", float("nan"), BOUND))
    return checks


def _rows(device, rng, record, small: bool) -> None:
    for L in (16, 13):
        for bits in BITS:
            packed = random_matrix(45, 208, (bits, 4), rng=rng, L=L)
            matrix = on_device(packed, device)
            exact = torch.from_numpy(reference.decode(packed)).double()
            record(f"decode {bits:g} bits L={L}", relative_error(kernels.decode(matrix), exact), 1e-6)
            for dtype in (torch.bfloat16, torch.float16):
                error = relative_error(kernels.decode(matrix, dtype=dtype), exact)
                record(f"decode {bits:g} bits L={L} {dtype}", error)
    for cols in (100, 1040) if small else (100, 576, 4096, 7168):
        packed = random_matrix(77, cols, (4, 2.5, 8), rng=rng, is_scaled=True)
        matrix = on_device(packed, device)
        tokens = torch.from_numpy(rng.integers(0, 77, 9)).to(device)
        rows = kernels.embedding(matrix, tokens, torch.bfloat16)
        record(f"embedding {cols}", relative_error(rows, exact_stored(packed)[tokens.cpu()]))


def _products(device, rng, record, small: bool) -> None:
    batches = (1, 4, 5, 8, 16, 32, 33)
    shapes = [(45, 208), (33, 1100)] if small else [(45, 208), (1030, 4096), (576, 1536), (333, 14336)]
    for rows, cols in shapes:
        for bits in ((4,), MIXED_BITS):
            mixed = bits == MIXED_BITS
            packed = random_matrix(
                rows, cols, bits, rng=rng, rank=20 if mixed else 0, factor_bits=(6, 3.5), is_scaled=mixed
            )
            matrix = on_device(packed, device)
            exact = exact_stored(packed)
            for batch in batches:
                for dtype in (torch.bfloat16,) if small else (torch.bfloat16, torch.float16):
                    x = torch.randn(batch, cols).to(dtype)
                    (y,) = kernels.linear([matrix], x.to(device))
                    record(
                        f"linear {rows}x{cols} {bits} x{batch} {dtype}",
                        relative_error(y, x.double() @ exact.T),
                    )
    packed_parts = [random_matrix(rows, 208, (4, 3), rng=rng) for rows in (45, 16, 100)]
    parts = [on_device(packed, device) for packed in packed_parts]
    x = torch.randn(3, 208)
    for packed, y in zip(packed_parts, kernels.linear(parts, x.to(device)), strict=True):
        record(
            f"linear, part of {packed.rows} rows",
            relative_error(y, x.double() @ exact_stored(packed).T),
            1e-3,
        )
    if not small:  # large enough for two row groups per block on any GPU
        packed = random_matrix(16384, 208, (4, 2), rng=rng)
        matrix, exact = on_device(packed, device), exact_stored(packed)
        for batch in batches:
            x = torch.randn(batch, 208)
            (y,) = kernels.linear([matrix], x.to(device))
            record(f"linear 16384x208 x{batch}", relative_error(y, x.double() @ exact.T))


def _experts(device, rng, record, small: bool) -> None:
    shape, count = ((50, 80), 5) if small else ((512, 1024), 16)
    packed = ExpertStack(
        tuple(random_matrix(*shape, 0 if index == 2 else (4, 2.5, 3), rng=rng) for index in range(count))
    )
    stack = kernels.DeviceStack.on_device(packed.header, blob_on(packed, device))
    matrices = torch.stack([exact_stored(expert) for expert in packed.experts])
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
        packed = tiles_as_matrix(codes.cpu().numpy(), bits, L)
        stored = torch.from_numpy(reference.decode(packed)).reshape(16, tiles, 16)
        stored = stored.transpose(0, 1).reshape(tiles, 256).double()
        record(f"encode {bits:g} bits: codes are what was decoded", relative_error(decoded, stored), 1e-6)
        # Root mean squared error over the native encoder's on Gaussian weights.
        error = relative_error(decoded, targets.double()) * 2.0**bits / MSE_BY_L[L][bits] ** 0.5
        record(f"encode {bits:g} bits: error over the native encoder's", error, 1.1)
