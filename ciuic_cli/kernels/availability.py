"""Whether the kernels work on a device, found out once, with the reason where they do not."""

from __future__ import annotations

import threading
import warnings

import torch

from ciuic_cli.errors import CiuicError
from ciuic_cli.kernels import sources
from ciuic_cli.kernels.launcher import CudaLauncher, launcher_for

_RUN_TIME_UNITS = ("transform", "linear", "decode")

_known: dict[torch.device, tuple[bool, str]] = {}
_lock = threading.Lock()


def available(device: torch.device | str) -> tuple[bool, str]:
    """Whether the kernels can be built for and loaded on `device`, and if not, why.

    The first call for a device compiles what is not in the cache (some seconds) and, where that fails,
    warns: the portable path that then decodes is much slower, and nobody should have to guess why.

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
            for unit in _RUN_TIME_UNITS:
                launcher.load(sources.UNITS[unit][0], 16)
    except (CiuicError, RuntimeError) as error:  # the latter from cuda-bindings: a driver that it cannot load
        reason = str(error)
        warnings.warn(
            f"the CUDA kernels cannot be used on {device}; torch operations take their place and are much "
            f"slower: {reason}",
            RuntimeWarning,
            stacklevel=3,
        )
        return False, reason
    return True, ""
