"""A launcher that runs the CUDA kernels' source on the host (emulator.cpp), and matrices in its guarded memory.

Its tensors end at a protected page and start as NaN. So an access beyond their end fails the test, and an element that
no kernel wrote shows up as NaN.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import torch

from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.stack import ExpertStack
from ciuic_cli.codecs.testing import blob_of
from ciuic_cli.kernels import DeviceMatrix, DeviceStack, sources
from ciuic_cli.kernels.launcher import Launch, Limits

_POISON = 0xFF  # NaN in every floating-point type
_CANARY = 0xA5  # fills the bytes between the end of a tensor and its guard page
_HERE = Path(__file__).parent
_FAILURES = {
    1: "no such kernel, or parameters of another size",
    2: "some lanes never reached a barrier",
    3: "memory outside every buffer was accessed",
    4: "an impossible launch",
}


def build(folder: Path, L: int) -> ctypes.CDLL:
    """The kernels for one number of trellis state bits, compiled for the host."""
    library = folder / f"emulated_L{L}.so"
    compiler = shutil.which("g++") or shutil.which("c++") or "c++"
    includes = [sources.folder(), Path(sources.__file__).parents[1] / "native", _HERE]
    command = [compiler, "-std=c++17", "-O2", "-fPIC", "-shared", "-fno-strict-aliasing", "-x", "c++"]
    command += ["-DCIUIC_EMULATE", f"-DCIUIC_L={L}", "-Wall", "-Werror"]
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
    """A `Launcher` on CPU tensors.

    Args:
        libraries: compiled kernels by L.
        limits: of the emulated device.
    """

    def __init__(self, libraries: dict[int, ctypes.CDLL], limits: Limits) -> None:
        self.libraries = libraries
        self.limits = limits
        self.launched: list[str] = []
        self._allocator = libraries[16]
        self._buffers: list[tuple[int, int]] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        count = int(torch.Size(shape).numel())
        nbytes = count * dtype.itemsize
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        address = self._allocator.emu_alloc(nbytes)
        assert address, "out of memory"
        ctypes.memset(address, _POISON, nbytes)
        ctypes.memset(address + nbytes, _CANARY, -nbytes % 16)
        self._buffers.append((address, nbytes))
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        return torch.frombuffer(memory, dtype=dtype, count=count).reshape(shape)

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        """A copy in guarded memory."""
        out = self.empty(tuple(values.shape), values.dtype)
        return out.copy_(values)

    def launch(self, launch: Launch) -> None:
        assert launch.shared_bytes <= self.limits.shared_bytes, (
            f"{launch.kernel} needs {launch.shared_bytes} bytes of shared memory"
        )
        self.launched.append(launch.kernel)
        status = self.libraries[launch.L].emu_launch(
            launch.kernel.encode(),
            *launch.grid,
            launch.threads,
            launch.shared_bytes,
            ctypes.byref(launch.parameters),
            ctypes.c_size_t(ctypes.sizeof(launch.parameters)),
            len(self.launched),
        )
        assert status == 0, f"{launch.kernel}: {_FAILURES[status]}"
        self.check_canaries()

    def check_canaries(self) -> None:
        """Fails if a byte between a buffer's end and its guard page has changed."""
        for address, nbytes in self._buffers:
            canaries = ctypes.string_at(address + nbytes, -nbytes % 16)
            assert canaries == bytes([_CANARY]) * len(canaries), "a kernel wrote past the end of a buffer"

    def close(self) -> None:
        for address, nbytes in self._buffers:
            self._allocator.emu_free(address, nbytes)
        self._buffers.clear()


def on_device(emulator: Emulator, packed: PackedMatrix) -> DeviceMatrix:
    """The matrix with its blob, offsets and input scales in guarded memory."""
    blob = emulator.tensor(blob_of(packed))
    return _guarded(emulator, DeviceMatrix.on_device(packed.header, blob))


def stack_on_device(emulator: Emulator, experts: list[PackedMatrix]) -> DeviceStack:
    """The stack with its blob and offsets in guarded memory."""
    stack = ExpertStack(tuple(experts))
    made = DeviceStack.on_device(stack.header, emulator.tensor(blob_of(stack)))
    return replace(made, group_offset=emulator.tensor(made.group_offset))


def _guarded(emulator: Emulator, matrix: DeviceMatrix) -> DeviceMatrix:
    factors, lowrank = matrix.input_factors, None
    if matrix.lowrank is not None:
        right, left = matrix.lowrank
        lowrank = (_guarded(emulator, right), _guarded(emulator, left))
    return replace(
        matrix,
        group_offset=emulator.tensor(matrix.group_offset),
        input_factors=None if factors is None else emulator.tensor(factors),
        lowrank=lowrank,
    )
