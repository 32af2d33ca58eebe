"""Launching a kernel on a device: the driver's modules and functions, found once per device.

`launcher_for(device)` is the only way from the functions of this package to a device, so that tests can put
an emulator of the kernels in its place.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ciuic_cli.errors import EnvironmentFault, UsageError
from ciuic_cli.kernels import compiler, sources


@dataclass(frozen=True)
class Limits:
    """What a launch on a device can count on."""

    shared_bytes: int
    """Shared memory that one block can have."""

    multiprocessors: int


class Launcher(Protocol):
    """A device that runs the kernels."""

    limits: Limits

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory on the device."""
        ...

    def launch(
        self,
        kernel: str,
        grid: tuple[int, int],
        threads: int,
        shared_bytes: int,
        parameters: ctypes.Structure,
        window_bits: int,
    ) -> None:
        """Enqueues `kernel` on the current stream; `parameters` are copied before the call returns."""
        ...


LAUNCHERS: dict[torch.device, Launcher] = {}
"""One per device, made at first use."""

_lock = threading.Lock()


def launcher_for(device: torch.device) -> Launcher:
    """The launcher of a device.

    Raises:
        UsageError: the device is no CUDA device.
        EnvironmentFault: its GPU is too old, or the driver or NVRTC is missing.
    """
    found = LAUNCHERS.get(device)
    if found is None:
        if device.type != "cuda":
            raise UsageError(f"the CUDA kernels cannot run on device '{device}'")
        with _lock:
            found = LAUNCHERS.setdefault(device, CudaLauncher(device))
    return found


class CudaLauncher:
    """Launches through the driver's API, on torch's context and current stream.

    Args:
        device: "cuda" or "cuda:<index>".
    """

    def __init__(self, device: torch.device) -> None:
        self.driver = _driver()
        if torch.version.hip is not None or not torch.cuda.is_available():
            raise EnvironmentFault("torch sees no CUDA device")
        self.device = torch.device(
            "cuda", torch.cuda.current_device() if device.index is None else device.index
        )
        major, minor = torch.cuda.get_device_capability(self.device)
        self.architecture = compiler.target(10 * major + minor)
        with torch.cuda.device(self.device):
            # makes torch's context, which the driver's calls below use
            torch.cuda.current_stream().synchronize()
            handle = self._call(self.driver.cuCtxGetDevice())
            names = self.driver.CUdevice_attribute
            shared = names.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
            processors = names.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
            self.limits = Limits(
                self._call(self.driver.cuDeviceGetAttribute(shared, handle)),
                self._call(self.driver.cuDeviceGetAttribute(processors, handle)),
            )
        self.functions: dict[tuple[str, int], Any] = {}
        self.modules: dict[tuple[str, int], Any] = {}
        self.lock = threading.Lock()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def launch(
        self,
        kernel: str,
        grid: tuple[int, int],
        threads: int,
        shared_bytes: int,
        parameters: ctypes.Structure,
        window_bits: int,
    ) -> None:
        function = self.functions.get((kernel, window_bits))
        if function is None:
            function = self.load(kernel, window_bits)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(parameters))
        stream = torch.cuda.current_stream(self.device).cuda_stream
        with torch.cuda.device(self.device):
            (status,) = self.driver.cuLaunchKernel(
                function,
                grid[0],
                grid[1],
                1,
                threads,
                1,
                1,
                shared_bytes,
                stream,
                ctypes.addressof(pointers),
                0,
            )
        if status:
            self._fail(
                status, f"launching {kernel} with grid {grid}, {threads} threads, {shared_bytes} bytes"
            )

    def load(self, kernel: str, window_bits: int) -> Any:
        """The driver's handle of a kernel; compiles its unit if nobody has yet.

        Raises:
            EnvironmentFault: the unit does not compile, or the driver refuses it.
        """
        unit = sources.UNIT_OF[kernel]
        with self.lock, torch.cuda.device(self.device):
            module = self.modules.get((unit, window_bits))
            if module is None:
                code = compiler.cached_unit(unit, self.architecture, window_bits)
                status, module = self.driver.cuModuleLoadData(code)
                if status:
                    self._fail(status, f"loading {unit}.cu compiled for {self.architecture}")
                self.modules[unit, window_bits] = module
            function = self._call(self.driver.cuModuleGetFunction(module, kernel.encode()))
            names = self.driver.CUfunction_attribute
            static = self._call(
                self.driver.cuFuncGetAttribute(names.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function)
            )
            self._call(
                self.driver.cuFuncSetAttribute(
                    function,
                    names.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    self.limits.shared_bytes - static,
                )
            )
            self.functions[kernel, window_bits] = function
            return function

    def _call(self, result: tuple) -> Any:
        if result[0]:
            self._fail(result[0], "asking the driver")
        return result[1] if len(result) > 1 else None

    def _fail(self, status: Any, action: str) -> None:
        _, name = self.driver.cuGetErrorName(status)
        text = name.decode() if name else str(status)
        raise EnvironmentFault(
            f"{action} failed on {self.device}: {text}",
            remedy="A driver older than the compiler refuses its code: update the driver, or install the "
            "nvidia-cuda-nvrtc of torch's own CUDA version.",
        )


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise EnvironmentFault(
            "cuda-bindings, which reaches the CUDA driver, is not installed",
            remedy="Install the CUDA extra: pip install 'ciuic-cli[cuda]'.",
        ) from error
    return driver
