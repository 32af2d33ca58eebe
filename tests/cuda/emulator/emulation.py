"""A launcher that runs the CUDA kernels' own source on the host; see emulator.cpp.

Tensors made by it lie against pages that may not be touched and start as poison, so a read or write outside
stops the test and an element left unwritten shows.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import torch

from ciuic_cli.kernels import sources
from ciuic_cli.kernels.launcher import Limits

_POISON = 0xFF  # not a number in every floating type
_CANARY = 0xA5
_HERE = Path(__file__).parent
_FAILURES = {
    1: "no such kernel, or parameters of another size",
    2: "some lanes never reached a barrier",
    3: "memory outside every buffer was touched",
    4: "an impossible launch",
}


def build(folder: Path, window_bits: int) -> ctypes.CDLL:
    """The kernels for one window length, compiled for the host."""
    library = folder / f"emulated_L{window_bits}.so"
    compiler = shutil.which("g++") or shutil.which("c++") or "c++"
    includes = [sources.folder(), Path(sources.__file__).parents[1] / "native", _HERE]
    command = [compiler, "-std=c++17", "-O2", "-fPIC", "-shared", "-fno-strict-aliasing", "-x", "c++"]
    command += ["-DCIUIC_EMULATE", f"-DCIUIC_L={window_bits}", "-Wall", "-Werror"]
    command += ["-Wno-unknown-pragmas", "-Wno-unused-function"]
    command += [f"-I{folder}" for folder in includes]
    subprocess.run([*command, str(_HERE / "emulator.cpp"), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.emu_alloc.restype = ctypes.c_void_p
    loaded.emu_alloc.argtypes = [ctypes.c_size_t]
    loaded.emu_free.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    loaded.emu_parameter_bytes.restype = ctypes.c_size_t
    loaded.emu_offset.restype = ctypes.c_long
    return loaded


class Emulator:
    """Stands in for a GPU: `Launcher` on CPU tensors.

    Args:
        libraries: window length to the compiled kernels.
        limits: of the device to be.
    """

    def __init__(self, libraries: dict[int, ctypes.CDLL], limits: Limits) -> None:
        self.libraries = libraries
        self.limits = limits
        self.launched: list[str] = []
        self._any = next(iter(libraries.values()))
        self._made: list[tuple[int, int]] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        count = int(torch.Size(shape).numel())
        nbytes = count * dtype.itemsize
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        address = self._any.emu_alloc(nbytes)
        assert address, "out of memory"
        ctypes.memset(address, _POISON, nbytes)
        ctypes.memset(address + nbytes, _CANARY, -nbytes % 16)
        self._made.append((address, nbytes))
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        return torch.frombuffer(memory, dtype=dtype, count=count).reshape(shape)

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        """A guarded copy."""
        out = self.empty(tuple(values.shape), values.dtype)
        return out.copy_(values)

    def launch(
        self,
        kernel: str,
        grid: tuple[int, int],
        threads: int,
        shared_bytes: int,
        parameters: ctypes.Structure,
        window_bits: int,
    ) -> None:
        assert shared_bytes <= self.limits.shared_bytes, (
            f"{kernel} wants {shared_bytes} bytes of shared memory"
        )
        self.launched.append(kernel)
        status = self.libraries[window_bits].emu_launch(
            kernel.encode(),
            *grid,
            threads,
            shared_bytes,
            ctypes.byref(parameters),
            ctypes.c_size_t(ctypes.sizeof(parameters)),
            len(self.launched),
        )
        assert status == 0, f"{kernel}: {_FAILURES[status]}"
        self.check_canaries()

    def check_canaries(self) -> None:
        """Fails if one of the few bytes between a buffer's end and its guard page has changed."""
        for address, nbytes in self._made:
            rest = ctypes.string_at(address + nbytes, -nbytes % 16)
            assert rest == bytes([_CANARY]) * len(rest), "a kernel wrote past the end of a buffer"

    def close(self) -> None:
        for address, nbytes in self._made:
            self._any.emu_free(address, nbytes)
        self._made.clear()
