"""Compiling CUDA kernels with NVRTC, and a cache of machine code on disk that many processes may share.

Kernels are compiled one by one, when they are needed, because a launch waits for its kernel. Threads can compile at the
same time: the interpreter's lock is released. NVRTC needs no toolkit, no headers and no GPU; it comes with torch's CUDA
wheels or with `ciuic-cli[cuda]`.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ciuic_cli.errors import EnvironmentFault
from ciuic_cli.kernels import sources

OLDEST = 75
"""Oldest supported compute capability times ten: the first with integer tensor cores."""

OPTIONS = ("--std=c++17", "--restrict")
"""NVRTC options of every compilation."""

_REMEDY = "Install the CUDA extra: pip install 'ciuic-cli[cuda]'."
_DIGEST_BYTES = 32
"""Bytes of SHA-256 at the start of a cache file."""

_ABANDONED_SECONDS = 3600
"""Age in seconds at which a temporary file in the cache is taken for one of a killed process (chosen, not tuned)."""


def target(capability: int) -> str:
    """NVRTC's target architecture for a GPU of this compute capability (times ten).

    N is the newest capability that NVRTC knows and that is not newer than the GPU's. If both are of one generation the
    target is "sm_N", machine code; otherwise "compute_N", PTX, which the driver compiles.

    Raises:
        EnvironmentFault: the GPU is too old, or there is no NVRTC.
    """
    if capability < OLDEST:
        raise EnvironmentFault(
            f"a GPU of compute capability {capability / 10} is too old for the CUDA kernels",
            remedy=f"They need {OLDEST / 10} or newer.",
        )
    nvrtc = _nvrtc()
    status, *rest = nvrtc.nvrtcGetSupportedArchs()
    known = _checked(nvrtc, status, rest)[0]
    older = [arch for arch in known if arch <= capability]
    if not older:
        raise EnvironmentFault(f"NVRTC cannot compile for compute capability {capability / 10}")
    newest = max(older)
    kind = "sm" if newest // 10 == capability // 10 else "compute"
    return f"{kind}_{newest}"


def compile_kernel(kernel: str, architecture: str, L: int = 16) -> bytes:
    """Machine code (cubin) of one kernel, or PTX for a `compute_` architecture. Does not use the cache.

    Args:
        kernel: key of `sources.UNIT_OF`.
        architecture: "sm_90", "compute_120" and so on.
        L: trellis state bits, 12 to 16.

    Raises:
        EnvironmentFault: there is no NVRTC, or the kernel does not compile; the message contains the compiler's log.
    """
    nvrtc = _nvrtc()
    with _compiled(nvrtc, kernel, architecture, L) as program:
        if architecture.startswith("compute_"):
            size_of, read = nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX
        else:
            size_of, read = nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN
        status, size = size_of(program)
        _checked(nvrtc, status)
        code = bytes(size)
        _checked(nvrtc, *read(program, code))
        return code


def resource_report(kernel: str, architecture: str, L: int = 16) -> str:
    """ptxas's report (`-v`) on a kernel: registers, stack, spills. Raises as `compile_kernel`."""
    nvrtc = _nvrtc()
    with _compiled(nvrtc, kernel, architecture, L, "--ptxas-options=-v") as program:
        return _log(nvrtc, program)


@contextmanager
def _compiled(nvrtc: Any, kernel: str, architecture: str, L: int, *more: str) -> Iterator[Any]:
    unit = sources.UNIT_OF[kernel]
    names, texts = zip(*sources.headers().items(), strict=True)
    status, program = nvrtc.nvrtcCreateProgram(
        sources.source(unit).encode(),
        f"{unit}.cu".encode(),
        len(names),
        [text.encode() for text in texts],
        [name.encode() for name in names],
    )
    _checked(nvrtc, status)
    try:
        macros = (f"-DCIUIC_L={L}", *sources.choice(kernel))
        options = [f"--gpu-architecture={architecture}", *macros, *OPTIONS, *more]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise EnvironmentFault(
                f"{kernel} in {unit}.cu does not compile for {architecture}: {_log(nvrtc, program)}"
            )
        yield program
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def cached_kernel(kernel: str, architecture: str, L: int = 16) -> bytes:
    """As `compile_kernel`, but from the cache if possible.

    A cache file's name depends on everything that its content depends on. The file appears by renaming and begins with
    a digest of the rest. So concurrent and killed processes do no harm, and a damaged file is replaced. If the folder
    cannot be written, every process compiles.
    """
    file = cache_folder() / _file_name(kernel, architecture, L)
    code = _read(file)
    if code is None:
        code = compile_kernel(kernel, architecture, L)
        _write(file, code)
    return code


def is_cached(kernel: str, architecture: str, L: int = 16) -> bool:
    """Whether `cached_kernel` would find the kernel in the cache."""
    return _read(cache_folder() / _file_name(kernel, architecture, L)) is not None


def cache_folder() -> Path:
    """`kernels` in $CIUIC_CACHE, or in `ciuic` under $XDG_CACHE_HOME or ~/.cache."""
    folder = os.environ.get("CIUIC_CACHE")
    if folder:
        return Path(folder) / "kernels"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ciuic" / "kernels"


def nvrtc_version() -> tuple[int, int]:
    """(major, minor). Raises EnvironmentFault where there is no NVRTC."""
    nvrtc = _nvrtc()
    status, major, minor = nvrtc.nvrtcVersion()
    _checked(nvrtc, status)
    return major, minor


def _file_name(kernel: str, architecture: str, L: int) -> str:
    source = sources.digest(sources.UNIT_OF[kernel])
    inputs = (source, sources.choice(kernel), architecture, L, OPTIONS, nvrtc_version())
    key = hashlib.sha256(repr(inputs).encode()).hexdigest()
    return f"{kernel}-{architecture}-L{L}-{key[:32]}.bin"


def _read(file: Path) -> bytes | None:
    try:
        content = file.read_bytes()
    except OSError:
        return None
    expected, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return code if code and hashlib.sha256(code).digest() == expected else None


def _write(file: Path, code: bytes) -> None:
    prefix = f".{file.stem}-"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=prefix)
    except OSError:
        return  # no cache: the next process compiles again
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(hashlib.sha256(code).digest() + code)
        os.replace(name, file)
        _remove_abandoned(file.parent, prefix)
    except OSError:
        return
    finally:
        Path(name).unlink(missing_ok=True)


def _remove_abandoned(folder: Path, prefix: str) -> None:
    """Removes temporary files of killed processes; those that other processes are writing are younger."""
    for entry in folder.iterdir():
        if entry.name.startswith(prefix) and time.time() - entry.stat().st_mtime > _ABANDONED_SECONDS:
            entry.unlink(missing_ok=True)


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise EnvironmentFault(
            "cuda-bindings, the interface to NVIDIA's run-time compiler, is not installed", remedy=_REMEDY
        ) from error
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:  # raised if the library is missing
        raise EnvironmentFault(
            f"NVIDIA's run-time compiler cannot be loaded: {error}", remedy=_REMEDY
        ) from error
    return nvrtc


def _checked(nvrtc: Any, status: Any, rest: Any = ()) -> Any:
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        _, text = nvrtc.nvrtcGetErrorString(status)
        raise EnvironmentFault(f"NVIDIA's run-time compiler failed: {text.decode()}")
    return rest


def _log(nvrtc: Any, program: Any) -> str:
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    text = bytes(size)
    nvrtc.nvrtcGetProgramLog(program, text)
    return text.rstrip(b"\0").decode(errors="replace").strip()
