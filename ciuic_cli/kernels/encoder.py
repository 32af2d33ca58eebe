"""The GPU encoder: a Viterbi search for the codes of tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ciuic_cli.codecs.bits import BITS, TILE_BYTES_PER_BIT
from ciuic_cli.codecs.header import L_VALUES
from ciuic_cli.codecs.transform import TILE
from ciuic_cli.errors import EnvironmentFault, UsageError
from ciuic_cli.kernels import parameters as p
from ciuic_cli.kernels.launcher import CudaLauncher, Launch, launcher_for

_MAX_THREADS = 512
"""Most threads per block of the search (chosen, not tuned)."""

_TILE_WEIGHTS = TILE * TILE

SCRATCH_BYTES = 3 << 30
"""Most bytes for the costs of all searches of one launch (chosen, not tuned)."""

TILES_PER_MULTIPROCESSOR = 2
"""Blocks, each with one tile, that run on a multiprocessor at once from 4 bits on; below, registers allow only one."""


def encode(targets: torch.Tensor, bits: float, L: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of closed paths with nearly the least squared error; a heuristic chooses where each path closes.

    Args:
        targets: float32 [tiles, 256] on a GPU, contiguous, finite: weight / row scale, a tile row by row.
        bits: K, one of BITS but 0.
        L: trellis state bits, 12 to 16.

    Returns:
        (codes uint8 [tiles, 32 * bits] as stored, decoded float32 [tiles, 256] in the units of `targets`).

    Raises:
        UsageError: shapes, dtypes, `bits` or `L` do not fit.
        EnvironmentFault: the kernel cannot be compiled or launched, or the GPU has too little shared memory for it (1
            and 1.5 bits at L = 16 need 128 KiB per block).
    """
    if targets.dim() != 2 or targets.shape[1] != _TILE_WEIGHTS or targets.dtype != torch.float32:
        raise UsageError(
            f"targets must be float32 [tiles, {_TILE_WEIGHTS}], not {targets.dtype} {list(targets.shape)}"
        )
    if not targets.is_contiguous():
        raise UsageError("targets must be contiguous")
    if bits not in BITS[1:] or L not in L_VALUES:
        raise UsageError(f"cannot encode with {bits:g} bits per weight and L = {L}")
    launcher = launcher_for(targets.device)
    tiles = targets.shape[0]
    codes = launcher.empty((tiles, int(TILE_BYTES_PER_BIT * bits)), torch.uint8)
    decoded = launcher.empty((tiles, _TILE_WEIGHTS), torch.float32)
    if tiles == 0:
        return codes, decoded
    prefixes = 1 << (L - int(bits))  # of an even step; odd steps have as many or half as many
    shared_bytes = 4 * prefixes
    if shared_bytes > launcher.limits.shared_bytes:
        raise EnvironmentFault(
            f"coding with {bits:g} bits per weight needs {shared_bytes} bytes of shared memory per block; this GPU has "
            f"{launcher.limits.shared_bytes}",
            remedy="leave out 1 and 1.5 bits with --bits, or use --device cpu",
        )
    history_bytes = 2 * (_TILE_WEIGHTS + 1) * prefixes
    # Each block has memory for its own costs.
    blocks = min(
        tiles,
        TILES_PER_MULTIPROCESSOR * launcher.limits.multiprocessors,
        max(1, SCRATCH_BYTES // history_bytes),
    )
    scratch = launcher.empty((blocks, history_bytes // 2), torch.float16)
    parameters = p.Encode(
        targets=targets.data_ptr(),
        codes=codes.data_ptr(),
        decoded=decoded.data_ptr(),
        scratch=scratch.data_ptr(),
        tiles=tiles,
    )
    threads = max(32, min(_MAX_THREADS, prefixes))
    launcher.launch(Launch(_kernel(bits), (blocks, 1), threads, shared_bytes, parameters, L))
    return codes, decoded


def prepare(
    device: torch.device,
    searches: Iterable[tuple[float, int]],
    hint: Callable[[str], None] = lambda message: None,
) -> None:
    """Compile and load the kernels for (bits per weight, L), several at the same time.

    Without it, `encode` compiles each one when it needs it.

    hint: called with a message for the user before kernels are compiled.

    Raises:
        EnvironmentFault: a kernel cannot be compiled or loaded.
    """
    launcher = launcher_for(device)
    if isinstance(launcher, CudaLauncher):
        launcher.load_all(((_kernel(bits), L) for bits, L in searches), hint)


def _kernel(bits: float) -> str:
    return f"encode_h{int(2 * bits)}"
