"""Memory of this process: how much there is of it, what says that there is no more, and what was freed goes back."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import sys
from pathlib import Path

from ciuic_cli.errors import EnvironmentFault

_NO_MEMORY = (
    "can't allocate memory",  # torch's allocator
    "cannot allocate memory",  # the system's own words, of a library that keeps no error number
    "not enough memory",  # the same allocator on other systems
    "out of memory",
    "insufficient memory",
    "unable to allocate",
    "failed to allocate",
    "bad_alloc",
    "can't alloc",  # what compiles oneDNN's and fbgemm's products
    "could not create a primitive",  # oneDNN, whatever it lacked; our products are of kinds that it knows
    "could not create a memory object",
    "could not execute a primitive",
    "failed to map segment",  # the dynamic linker, of a library that is imported
)
_NO_THREAD = ("can't start new thread", "threadpoolbuilderror")  # Python; rayon, which tokenizers use


def exhaustion(error: BaseException) -> EnvironmentFault | None:
    """The fault behind an exception that says that memory or threads are used up, however a library says it.

    None for any other exception.
    """
    said = str(error).lower()
    if type(error).__name__ == "OutOfMemoryError":
        return EnvironmentFault("device memory is exhausted", remedy="free the GPU, or use --device cpu")
    if any(words in said for words in _NO_THREAD):
        return EnvironmentFault(
            "the system starts no more threads",
            remedy="end other processes, free memory, or raise the limits (ulimit -u, ulimit -v)",
        )
    if (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or any(words in said for words in _NO_MEMORY)
    ):
        return EnvironmentFault(
            "memory is exhausted",
            remedy="free memory or raise its limit (ulimit -v), or use a smaller --seqlen, --nsamples or --batch-size",
        )
    return None


def machine_fault(error: BaseException) -> EnvironmentFault | None:
    """What the machine refuses, however a library says it; None for any other exception."""
    fault = exhaustion(error)
    if fault is not None or not isinstance(error, OSError):
        return fault
    temporary = "temporary directory" in str(error)
    return EnvironmentFault(
        f"the system refuses: {error.strerror or error}",
        file=None if error.filename is None else str(error.filename),
        remedy="set TMPDIR to a folder that can be written to"
        if temporary
        else "check disk space and permissions",
    )


def resident_bytes() -> int:
    """Bytes resident now."""
    import psutil  # here: every command imports this module

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


_M_MMAP_THRESHOLD = -3  # of mallopt, <malloc.h>
_MMAP_FROM = 16 << 20
"""Below it activations are reused; at 1 MB, mapping and clearing them took twice the system time."""
_SLACK = 64 << 20
_settled = 0
"""Bytes that were resident when freed memory was last given back, or fewer since."""
_PRIMITIVES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16", "LRU_CACHE_CAPACITY": "16"}
"""Products whose compiled code is kept: by oneDNN, and by what stands between it and torch."""
_WEIGHT_COPIES = 7
"""Float32 copies of a matrix that preparing, probing or rounding it holds at its peak."""
_CONTEXT_COPIES = 3
"""As many more where the rows have contexts of their own: those, and what rounding makes of them."""
_MOMENT_COPIES = 8
"""The same of each of its moments: in double precision, its factor, and their temporaries."""
SIDE_BY_SIDE = 256 << 20
"""Work that takes more bytes than this is done alone, by all threads together."""


def matrix_bytes(rows: int, cols: int, *, full_outputs: bool, contexts: bool = False) -> int:
    """The most bytes that preparing, probing or rounding a matrix takes.

    full_outputs: G is a matrix, not only its diagonal. contexts: the rows differ in their inputs.
    """
    squares = cols**2 + (rows**2 if full_outputs else 0)
    copies = _WEIGHT_COPIES + (_CONTEXT_COPIES if contexts else 0)
    return 4 * (copies * rows * cols + _MOMENT_COPIES * squares)


def return_freed_memory() -> None:
    """Give the allocator's free pages back to the system; does nothing where the C library is not glibc."""
    trim = getattr(_c_library(), "malloc_trim", None)
    if trim is not None:
        trim(0)


def limit_freed_memory() -> None:
    """As `return_freed_memory`, if the process has grown by `_SLACK` since it was called here; for inner loops.

    In a heap of many holes each block goes where it fits best: within one layer, most holes are touched once, and
    stay resident. A layer that needs 240 MB then took 600.
    """
    global _settled
    resident = resident_bytes()
    if resident > _settled + _SLACK:
        return_freed_memory()
        resident = resident_bytes()
        _settled = resident
    _settled = min(_settled, resident)


def steady_memory() -> None:
    """Keep resident memory near what is in use, for a process that works through layers of many sizes.

    glibc raises the size from which blocks are mapped singly each time that such a block is freed, so that
    after some layers matrices lie scattered in a heap that never shrinks; here the size is fixed. oneDNN and torch
    each keep the compiled code of the last 1024 products, one per number of tokens: with experts, hundreds of MB.
    """
    for name, capacity in _PRIMITIVES.items():
        os.environ.setdefault(name, capacity)
    option = getattr(_c_library(), "mallopt", None)
    if option is not None:
        option(_M_MMAP_THRESHOLD, _MMAP_FROM)


def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)
