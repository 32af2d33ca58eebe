"""Whether the kernels work on a device: tried once per device, with the reason if they do not."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable

import torch

from ciuic_cli.errors import CiuicError
from ciuic_cli.kernels import sources
from ciuic_cli.kernels.launcher import CudaLauncher, indexed, launcher_for

_TRIED = tuple((sources.UNITS[unit][0], 16) for unit in ("transform", "linear", "decode"))
"""Kernels (name, L) that are compiled and loaded to find out: one of each file that inference needs."""

_known: dict[torch.device, tuple[bool, str]] = {}
"""Results by device."""

_lock = threading.Lock()


def available(
    device: torch.device | str, hint: Callable[[str], None] = lambda message: None
) -> tuple[bool, str]:
    """Whether the kernels can be compiled for `device` and loaded there.

    The first call for a device takes some seconds if the kernels are not in the cache. If they cannot be used it warns
    and gives the reason, because torch operations, which replace them, are much slower.

    hint: called with a message for the user before kernels are compiled.

    Returns:
        (True, "") or (False, reason).
    """
    device = indexed(torch.device(device))
    with _lock:
        if device not in _known:
            _known[device] = _try(device, hint)
        return _known[device]


def _try(device: torch.device, hint: Callable[[str], None]) -> tuple[bool, str]:
    if device.type != "cuda":
        return False, f"the kernels run on CUDA devices, not on '{device}'"
    try:
        launcher = launcher_for(device)
        if isinstance(launcher, CudaLauncher):
            launcher.load_all(_TRIED, hint)
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
