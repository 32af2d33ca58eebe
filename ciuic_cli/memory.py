"""Memory of this process."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import psutil


def resident_bytes() -> int:
    """Bytes resident now."""
    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """The most bytes that were ever resident.

    Linux keeps `ru_maxrss` across exec, so a child would report its parent's peak; VmHWM is the process's own.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
