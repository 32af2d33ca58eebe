"""A product through CudaLauncher; test_launcher.py runs this script with a stub libcuda in the library path."""

from __future__ import annotations

import contextlib
import types

import torch

from ciuic_cli.codecs.testing import blob_of, exact_stored, random_matrix, relative_error
from ciuic_cli.errors import EnvironmentFault
from ciuic_cli.kernels import DeviceMatrix, compiler, linear
from ciuic_cli.kernels.launcher import LAUNCHERS, CudaLauncher

# torch's CPU build cannot answer these. The stub expects this stream.
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

packed = random_matrix(45, 144)
matrix = DeviceMatrix.on_device(packed.header, blob_of(packed).clone())
x = torch.randn(3, 144)
for _ in range(2):
    (y,) = linear([matrix], x)
    assert relative_error(y, x.double() @ exact_stored(packed).T) < 6e-5
assert compiled == [("transform", "sm_90", 16), ("linear", "sm_90", 16)]  # once each

launcher.modules.clear()
launcher.functions.clear()
compiler.cached_unit = lambda *key: b"damaged"
try:
    linear([matrix], x)
except EnvironmentFault as error:
    assert "CUDA_ERROR_INVALID_IMAGE" in str(error) and "update the driver" in str(error)
else:
    raise AssertionError("a module that the driver refuses was not reported")
print("all as expected")
