"""Whether the kernels work on a device: tried once per device, with the reason if they do not."""

from __future__ import annotations

import threading
import warnings

import torch

from ciuic_cli.errors import CiuicError
from ciuic_cli.kernels import sources
from ciuic_cli.kernels.launcher import CudaLauncher, launcher_for

_INFERENCE_UNITS = ("transform", "linear", "decode")
"""Compilation units that inference needs."""

_known: dict[torch.device, tuple[bool, str]] = {}
"""Results by device."""

_lock = threading.Lock()


def available(device: torch.device | str) -> tuple[bool, str]:
    """Whether the kernels can be compiled for `device` and loaded there.

    The first call for a device takes some seconds if the kernels are not in the cache. If they cannot be used it warns
    and gives the reason, because torch operations, which replace them, are much slower.

    Returns:
        (True, "") or (False, reason).
    """
    device = torch.device(device)
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    with _lock:
        if device not in _known:
            _known[device] = _try(device)
        return _known[device]


def _try(device: torch.device) -> tuple[bool, str]:
    if device.type != "cuda":
        return False, f"the kernels run on CUDA devices, not on '{device}'"
    try:
        launcher = launcher_for(device)
        if isinstance(launcher, CudaLauncher):
            for unit in _INFERENCE_UNITS:
                launcher.load(sources.UNITS[unit][0], 16)
    except (CiuicError, RuntimeError) as error:  # RuntimeError: cuda-bindings cannot load the driver
        reason = str(error)
        warnings.warn(
            f"the CUDA kernels cannot be used on {device}; torch operations replace them and are much slower: "
            f"{reason}",
            RuntimeWarning,
            stacklevel=3,
        )
        return False, reason
    return True, ""
