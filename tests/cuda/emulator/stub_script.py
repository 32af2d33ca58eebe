"""Run by test_launcher.py with a stub libcuda in the library path: a product through CudaLauncher."""

from __future__ import annotations

import contextlib
import types

import numpy as np
import torch
from random_matrices import dense, packed, relative_error

from ciuic_cli.errors import EnvironmentFault
from ciuic_cli.kernels import DeviceMatrix, compiler, linear
from ciuic_cli.kernels.launcher import LAUNCHERS, CudaLauncher

# What torch's CPU build cannot say; the stream's number is what the stub expects.
torch.cuda.is_available = lambda: True
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_capability = lambda device=None: (9, 0)
torch.cuda.device = lambda device: contextlib.nullcontext()
stream = types.SimpleNamespace(cuda_stream=0x5717, synchronize=lambda: None)
torch.cuda.current_stream = lambda device=None: stream
compiled: list[tuple] = []
compiler.cached_unit = lambda *key: compiled.append(key) or b"\x7fELF"

launcher = CudaLauncher(torch.device("cuda"))
assert (launcher.architecture, launcher.limits.shared_bytes) == ("sm_90", 232448)
assert launcher.limits.multiprocessors == 132
launcher.empty = lambda shape, dtype: torch.empty(shape, dtype=dtype)
LAUNCHERS[torch.device("cpu")] = launcher

matrix = packed(np.random.default_rng(0), 45, 144)
blob = torch.frombuffer(bytearray(matrix.to_bytes()), dtype=torch.uint8).clone()
view = DeviceMatrix(matrix, blob)
x = torch.randn(3, 144)
for _ in range(2):
    (y,) = linear([view], x)
    assert relative_error(y, x.double() @ dense(matrix).T) < 6e-5
assert compiled == [("transform", "sm_90", 16), ("linear", "sm_90", 16)]  # once each

launcher.modules.clear()
launcher.functions.clear()
compiler.cached_unit = lambda *key: b"damaged"
try:
    linear([view], x)
except EnvironmentFault as error:
    assert "CUDA_ERROR_INVALID_IMAGE" in str(error) and "update the driver" in str(error)
else:
    raise AssertionError("a module that the driver refuses went unnoticed")
print("all as expected")
