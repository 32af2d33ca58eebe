"""Launching a kernel on a device; every kernel is compiled, loaded and looked up once per device.

The functions of this package reach a device only through `launcher_for(device)`, so that tests can substitute an
emulator.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ciuic_cli.errors import EnvironmentFault, UsageError
from ciuic_cli.kernels import compiler


@dataclass(frozen=True)
class Limits:
    """Resources of a device, by which launches choose their blocks."""

    shared_bytes: int
    """Most bytes of shared memory that one block may have."""

    multiprocessors: int


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel."""

    kernel: str
    """Name, a key of `sources.UNIT_OF`."""

    grid: tuple[int, int]
    """Blocks in x and y."""

    threads: int
    """Threads per block."""

    shared_bytes: int
    """Bytes of dynamic shared memory per block."""

    parameters: ctypes.Structure
    """The kernel's only argument, one of `parameters`."""

    L: int
    """Trellis state bits for which the kernel is compiled."""

    early: bool = False
    """True if the kernel may begin while the one before it on the stream ends (programmatic dependent launch, from
    sm_90 on). It waits itself before it uses what that one writes."""


class Launcher(Protocol):
    """Runs the kernels on one device."""

    limits: Limits

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory on the device."""
        ...

    def launch(self, launch: Launch) -> None:
        """Enqueues a kernel on the current stream; its parameters are copied before the call returns."""
        ...


LAUNCHERS: dict[torch.device, Launcher] = {}
"""Launchers by device, each made at first use."""

_lock = threading.Lock()


def launcher_for(device: torch.device) -> Launcher:
    """The launcher of a device.

    Raises:
        UsageError: not a CUDA device.
        EnvironmentFault: its GPU is too old, or the driver or NVRTC is missing.
    """
    launcher = LAUNCHERS.get(device) or LAUNCHERS.get(indexed(device))
    if launcher is None:
        if device.type != "cuda":
            raise UsageError(f"the CUDA kernels cannot run on device '{device}'")
        with _lock:
            launcher = LAUNCHERS.setdefault(indexed(device), CudaLauncher(device))
    return launcher


def indexed(device: torch.device) -> torch.device:
    """The device with its number: "cuda" is torch's current GPU."""
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


class CudaLauncher:
    """Launches through the driver API, on torch's context and current stream.

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
        self.can_start_early = major >= 9
        self._configs = threading.local()
        with torch.cuda.device(self.device):
            # This creates torch's context, which the driver calls below use.
            torch.cuda.current_stream().synchronize()
            self.context = self._call(self.driver.cuCtxGetCurrent())
            handle = self._call(self.driver.cuCtxGetDevice())
            names = self.driver.CUdevice_attribute
            shared = names.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
            processors = names.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
            self.limits = Limits(
                self._call(self.driver.cuDeviceGetAttribute(shared, handle)),
                self._call(self.driver.cuDeviceGetAttribute(processors, handle)),
            )
        self.functions: dict[tuple[str, int], Any] = {}
        self.locks: dict[tuple[str, int], threading.Lock] = {}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def launch(self, launch: Launch) -> None:
        function = self.functions.get((launch.kernel, launch.L))
        if function is None:
            function = self.load(launch.kernel, launch.L)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(launch.parameters))
        stream = torch.cuda.current_stream(self.device).cuda_stream
        with torch.cuda.device(self.device):
            if launch.early and self.can_start_early:
                config = self._early_config()
                config.gridDimX, config.gridDimY = launch.grid
                config.blockDimX, config.sharedMemBytes = launch.threads, launch.shared_bytes
                config.hStream = stream
                (status,) = self.driver.cuLaunchKernelEx(config, function, ctypes.addressof(pointers), 0)
            else:
                (status,) = self.driver.cuLaunchKernel(
                    function, *launch.grid, 1, launch.threads, 1, 1, launch.shared_bytes, stream,
                    ctypes.addressof(pointers), 0,
                )  # fmt: skip
        if status:
            self._fail(
                status,
                f"launching {launch.kernel} with grid {launch.grid}, {launch.threads} threads and "
                f"{launch.shared_bytes} bytes of shared memory",
            )

    def _early_config(self) -> Any:
        """The calling thread's configuration of early launches, whose sizes and stream the caller sets."""
        config = getattr(self._configs, "early", None)
        if config is None:
            attribute = self.driver.CUlaunchAttribute()
            names = self.driver.CUlaunchAttributeID
            attribute.id = names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config = self._configs.early = self.driver.CUlaunchConfig()
            config.attrs, config.numAttrs = [attribute], 1
            config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        return config

    def load(self, kernel: str, L: int) -> Any:
        """The driver's handle of a kernel; compiles it if it is not in the cache. A thread waits only for its kernel.

        Raises:
            EnvironmentFault: the kernel does not compile, or the driver refuses it.
        """
        lock = self.locks.setdefault((kernel, L), threading.Lock())
        with lock, torch.cuda.device(self.device):
            if (kernel, L) in self.functions:
                return self.functions[kernel, L]
            code = compiler.cached_kernel(kernel, self.architecture, L)
            self._call(self.driver.cuCtxSetCurrent(self.context))  # torch leaves a new thread without one
            status, module = self.driver.cuModuleLoadData(code)
            if status:
                self._fail(status, f"loading {kernel} compiled for {self.architecture}")
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
            self.functions[kernel, L] = function
            return function

    def load_all(
        self, kernels: Iterable[tuple[str, int]], hint: Callable[[str], None] = lambda message: None
    ) -> None:
        """`load` for each (kernel, L), as many at the same time as there are processors.

        hint: called with a message for the user if kernels have to be compiled, which takes about a second for each.
        """
        missing = set(kernels) - self.functions.keys()
        count = sum(not compiler.is_cached(kernel, self.architecture, L) for kernel, L in missing)
        if count:
            hint(f"compiling CUDA kernels for {self.architecture}, once per machine: {count}")
        with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "ciuic-compile") as pool:
            for _ in pool.map(lambda one: self.load(*one), sorted(missing)):
                pass

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
            "nvidia-cuda-nvrtc of torch's CUDA version.",
        )


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise EnvironmentFault(
            "cuda-bindings, the interface to the CUDA driver, is not installed",
            remedy="Install the CUDA extra: pip install 'ciuic-cli[cuda]'.",
        ) from error
    return driver
