"""The encoder: tiles of targets to the trellis code, by Viterbi search on the GPU."""

from __future__ import annotations

import torch

from ciuic_cli.codecs.packing import UNIT_BYTES
from ciuic_cli.codecs.widths import BITS
from ciuic_cli.errors import UsageError
from ciuic_cli.kernels import parameters as p
from ciuic_cli.kernels.launcher import launcher_for

_THREADS = 512
_WEIGHTS = 256
_SCRATCH_BYTES = 3 << 30


def encode(targets: torch.Tensor, bits: float, window_bits: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Closed paths for tiles, of least squared error up to the choice of where the circle closes.

    Args:
        targets: float32 [tiles, 256] on a GPU, contiguous; weight / row scale, row by row of the tile.
            Finite.
        bits: K, one of BITS but 0.
        window_bits: L, 12 to 16.

    Returns:
        (codes uint8 [tiles, 32 * bits] as stored, decoded float32 [tiles, 256] in the units of `targets`).

    Raises:
        UsageError: shapes, dtypes or numbers that do not fit.
        EnvironmentFault: the kernel cannot be built or launched.
    """
    if targets.dim() != 2 or targets.shape[1] != _WEIGHTS or targets.dtype != torch.float32:
        raise UsageError(
            f"targets must be float32 [tiles, {_WEIGHTS}], not {targets.dtype} {list(targets.shape)}"
        )
    if not targets.is_contiguous():
        raise UsageError("targets must be contiguous")
    if bits not in BITS[1:] or not 12 <= window_bits <= 16:
        raise UsageError(f"cannot encode with {bits:g} bits and a window of {window_bits}")
    launcher = launcher_for(targets.device)
    tiles = targets.shape[0]
    codes = launcher.empty((tiles, int(UNIT_BYTES * bits)), torch.uint8)
    decoded = launcher.empty((tiles, _WEIGHTS), torch.float32)
    if tiles == 0:
        return codes, decoded
    prefixes = 1 << (window_bits - int(bits))  # of the steps that have the most
    history_bytes = 2 * (_WEIGHTS + 1) * prefixes
    # Two blocks per multiprocessor are all that can run at once; each keeps the costs of its own search.
    blocks = min(tiles, 2 * launcher.limits.multiprocessors, max(1, _SCRATCH_BYTES // history_bytes))
    scratch = launcher.empty((blocks, history_bytes // 2), torch.float16)
    parameters = p.Encode(
        targets=targets.data_ptr(),
        codes=codes.data_ptr(),
        decoded=decoded.data_ptr(),
        scratch=scratch.data_ptr(),
        tiles=tiles,
    )
    threads = max(32, min(_THREADS, prefixes))
    launcher.launch(f"encode_h{int(2 * bits)}", (blocks, 1), threads, 4 * prefixes, parameters, window_bits)
    return codes, decoded
