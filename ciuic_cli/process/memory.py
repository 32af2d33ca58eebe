"""Memory of this process: out-of-memory errors, resident size, the C allocator, and what one weight matrix needs.

`exhaustion` and `machine_fault` recognise errors that mean memory, threads or the machine, and return the
EnvironmentFault for them. `configure_allocators`, `return_freed_memory` and `limit_freed_memory` keep the resident
size near the memory in use, or below what a process may keep; `reuse_activations` saves the time of returning memory
and taking it again.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import sys
from pathlib import Path

from ciuic_cli.errors import EnvironmentFault

_NO_MEMORY = (
    "can't allocate memory",  # torch's allocator on Linux
    "cannot allocate memory",  # the C library's message, from a library that drops the error number
    "not enough memory",  # torch's allocator on other systems
    "out of memory",
    "insufficient memory",
    "unable to allocate",
    "failed to allocate",
    "bad_alloc",
    "can't alloc",  # the code generators of oneDNN and fbgemm
    "could not create a primitive",  # oneDNN, for any cause; it supports all products used here, so memory is left
    "could not create a memory object",
    "could not execute a primitive",
    "failed to map segment",  # the dynamic linker, for an imported library
)
"""Lower-case parts of messages that mean exhausted memory."""
_NO_THREAD = ("can't start new thread", "threadpoolbuilderror")
"""Lower-case parts of messages that mean no more threads: of Python, and of rayon, which tokenizers use."""
_NO_FILE = "too many open files"
"""Lower-case part of messages that mean no more file descriptors, also of the dynamic linker."""
_TRIED_BYTES = 4
"""Bytes of the file with which Python's tempfile tries whether a folder can be written to."""


def exhaustion(error: BaseException) -> EnvironmentFault | None:
    """The EnvironmentFault for an exception that means exhausted memory, threads or file descriptors; None for others.

    Libraries report this with many exception types, so the message decides too.
    """
    message = str(error).lower()
    if type(error).__name__ == "OutOfMemoryError":
        return EnvironmentFault("device memory is exhausted", remedy="free the GPU, or use --device cpu")
    if any(words in message for words in _NO_THREAD):
        return EnvironmentFault(
            "no more threads can be started",
            remedy="end other processes, free memory, or raise the limits (ulimit -u, ulimit -v)",
        )
    if _NO_FILE in message:
        return EnvironmentFault(
            "no more files can be opened",
            remedy="raise the limit on open files (ulimit -n)",
        )
    if (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or any(words in message for words in _NO_MEMORY)
    ):
        return EnvironmentFault(
            "memory is exhausted",
            remedy="free memory or raise its limit (ulimit -v), or use a smaller --seqlen, --nsamples or --batch-size",
        )
    return None


def machine_fault(error: BaseException) -> EnvironmentFault | None:
    """The EnvironmentFault for exhausted resources or any other OSError; None for any other exception."""
    fault = exhaustion(error)
    if fault is not None or not isinstance(error, OSError):
        return fault
    is_temporary = "temporary directory" in str(error)
    if is_temporary and 0 <= resource.getrlimit(resource.RLIMIT_FSIZE)[0] < _TRIED_BYTES:
        return EnvironmentFault(
            f"cannot write a temporary file: {os.strerror(errno.EFBIG)}",
            file=os.environ.get("TMPDIR", "/tmp"),
            remedy="raise the limit on the size of files (ulimit -f)",
        )
    return EnvironmentFault(
        f"the operating system reports: {error.strerror or error}",
        file=None if error.filename is None else str(error.filename),
        remedy="set TMPDIR to a folder that can be written to"
        if is_temporary
        else "check disk space and permissions",
    )


def resident_bytes() -> int:
    """Resident memory of this process now, in bytes."""
    try:  # `limit_freed_memory` asks in inner loops, and psutil takes three times as long (measured)
        with open("/proc/self/statm", "rb", buffering=0) as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except OSError:  # another system than Linux
        import psutil  # imported late: every command imports this module

        return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """Highest resident memory of this process so far, in bytes.

    On Linux it is VmHWM, because `ru_maxrss` of a child process includes its parent's peak.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    bytes_per_count = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * bytes_per_count


_M_MMAP_THRESHOLD = -3  # option of mallopt, from <malloc.h>
_MMAP_BYTES = 16 << 20
"""Bytes from which glibc maps a block separately, and returns it to the system when it is freed.

Smaller blocks, such as activations, are reused. At 1 MB, mapping and clearing took twice the system time.
"""
_M_TRIM_THRESHOLD = -1  # option of mallopt
_M_TOP_PAD = -2  # option of mallopt
_TOP_BYTES = 65 << 20
"""Bytes by which glibc extends a heap beyond what is asked for; untouched, they take no memory. A thread's heaps have
64 MB. With more than that here, glibc keeps an empty one, such as that of a layer's activations (measured:
docs/experiments/scale/freed-memory.md)."""
SLACK = 256 << 20
"""Default growth in bytes after which `limit_freed_memory` returns free pages, and most free bytes that glibc keeps at
the end of its heap; so much more than what is in use may be resident. With 64 MB, and the 128 kB that glibc keeps by
default, a fifth of the statistics' time went into mapping and clearing pages that had just been returned (measured:
docs/experiments/scale/account.md)."""
KEPT_BYTES = 3 << 29
"""Resident bytes of a compression up to which `limit_freed_memory` returns nothing. A model of 135 million weights
needs less, and a machine that compresses models has more. Mapping and clearing what had been returned took a twentieth
of the time of compressing that model (measured: docs/experiments/scale/freed-memory.md)."""
_LARGEST_REUSED = 32 << 20
"""Bytes from which a block is mapped separately while a model generates. It is the largest value that glibc takes; it
chooses this value, and twice as many bytes kept at the heap's end, by itself after it has freed such a block (measured:
docs/experiments/runtime/kept-memory.md)."""
_GLIBC_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
"""Environment variables by which users set glibc's allocator."""
_kept = 0
"""Resident bytes up to which `limit_freed_memory` returns nothing, as `configure_allocators` was told."""
_settled = 0
"""Resident bytes after the last return of freed memory, or the least since then."""
_PRIMITIVES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
"""Environment variables with the number of compiled products that oneDNN and torch's wrapper of it keep: more than a
layer has forward and backward (measured: docs/experiments/runtime/compiled-products.md)."""
_WEIGHT_COPIES = 7
"""Most float32 copies of a matrix that exist while it is prepared, probed or rounded. No measurement is on
record."""
_CONTEXT_COPIES = 3
"""Additional copies if the rows have contexts: the contexts, and temporaries of rounding with them."""
_MOMENT_COPIES = 5
"""The same count for each second moment: pricing and coding had four at a time, up to 4,096 rows, before they overwrote
moments (measured: docs/experiments/scale/large-matrices.md), and one is added for what was not measured."""
PARALLEL_WORK_BYTES = 256 << 20
"""Largest working set, in bytes, of an item that runs beside others. Larger items run alone with all threads. Chosen,
not tuned."""


def matrix_bytes(rows: int, cols: int, *, full_outputs: bool, contexts: bool = False) -> int:
    """Upper bound of the bytes needed to prepare, probe or round a matrix (rows, cols).

    full_outputs: the output Fisher G is a full (rows, rows) matrix, not only its diagonal.
    contexts: the inputs differ from row to row.
    """
    squares = cols**2 + (rows**2 if full_outputs else 0)
    copies = _WEIGHT_COPIES + (_CONTEXT_COPIES if contexts else 0)
    return 4 * (copies * rows * cols + _MOMENT_COPIES * squares)


def return_freed_memory() -> None:
    """Return the allocator's free pages to the system. Does nothing if the C library is not glibc."""
    trim = getattr(_c_library(), "malloc_trim", None)
    if trim is not None:
        trim(0)


def limit_freed_memory(slack: int = SLACK) -> None:
    """`return_freed_memory` if the process has grown by `slack` bytes since the last return; for inner loops. It does
    nothing while the process has no more than the bytes that `configure_allocators` allows it to keep.

    glibc puts a block into the hole that fits best. In a heap with many holes, one layer uses most of them once, and
    they stay resident: a layer that needs 240 MB took 600 MB.
    """
    global _settled
    resident = resident_bytes()
    if resident > max(_kept, _settled + slack):
        return_freed_memory()
        resident = resident_bytes()
        _settled = resident
    _settled = min(_settled, resident)


def configure_allocators(kept: int = 0) -> None:
    """Configure glibc and oneDNN so that resident memory stays near what is in use, over layers of many sizes.

    kept: resident bytes up to which freed memory stays with the process. If not 0, glibc also keeps empty heaps of
    threads.

    By default glibc raises its mmap threshold whenever a mapped block is freed. After some layers, matrices then lie
    in a fragmented heap that never shrinks. Here the threshold is fixed. By default oneDNN and torch each keep the
    compiled code of the last 1024 products, one per number of tokens; with experts that takes hundreds of MB. Here they
    keep 64. A limit that the user has set in the environment stays.
    """
    for name, capacity in _PRIMITIVES.items():
        os.environ.setdefault(name, capacity)
    global _kept
    _kept = kept
    _set_thresholds(_MMAP_BYTES, SLACK)
    if kept:
        _set_option(_M_TOP_PAD, _TOP_BYTES)


def reuse_activations() -> None:
    """Let glibc reuse the memory of activations instead of returning it to the system after every layer.

    For models that generate. Settings of glibc's allocator in the environment stay.
    """
    if not any(name in os.environ for name in _GLIBC_SETTINGS):
        _set_thresholds(_LARGEST_REUSED, 2 * _LARGEST_REUSED)


def _set_thresholds(mapped: int, kept: int) -> None:
    """glibc maps blocks from `mapped` bytes on separately, and keeps up to `kept` free bytes at the end of its heap."""
    _set_option(_M_MMAP_THRESHOLD, mapped)
    _set_option(_M_TRIM_THRESHOLD, kept)


def _set_option(option: int, value: int) -> None:
    """Set an option of glibc's allocator. Does nothing if the C library is not glibc."""
    mallopt = getattr(_c_library(), "mallopt", None)
    if mallopt is not None:
        mallopt(option, value)


def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)
