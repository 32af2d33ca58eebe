"""CudaLauncher: a product, loading in threads, a refused module.

test_launcher.py runs this script with a stub libcuda in the library path.
"""

from __future__ import annotations

import contextlib
import threading
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
compiler.cached_kernel = lambda *key: compiled.append(key) or b"\x7fELF"

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
assert compiled == [("transform", "sm_90", 16), ("linear_bytes_n4", "sm_90", 16)]  # once each

# Two kernels are compiled at the same time, and each once, though two threads want it. New threads have no context.
both = threading.Barrier(2, timeout=30)


def compiled_together(*key: object) -> bytes:
    compiled.append(key)
    both.wait()
    return b"\x7fELF"


compiled.clear()
compiler.cached_kernel = compiled_together
wanted = [("encode_h8", 16), ("encode_h8", 12)]
failures: list[object] = []
threading.excepthook = failures.append
threads = [threading.Thread(target=launcher.load, args=one) for one in 2 * wanted]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not failures and sorted(compiled) == [("encode_h8", "sm_90", 12), ("encode_h8", "sm_90", 16)]

compiler.cached_kernel = lambda *key: compiled.append(key) or b"\x7fELF"
compiler.is_cached = lambda kernel, architecture, L: L == 14
hints: list[str] = []
launcher.load_all([*wanted, ("encode_h8", 14), ("encode_h9", 14)], hints.append)
assert hints == [] and len(compiled) == 4  # all loaded, or in the cache
launcher.load_all([("encode_h8", 13), ("encode_h9", 13)], hints.append)
assert hints == ["compiling CUDA kernels for sm_90, once per machine: 2"] and len(compiled) == 6

launcher.functions.clear()
compiler.cached_kernel = lambda *key: b"damaged"
try:
    linear([matrix], x)
except EnvironmentFault as error:
    assert "CUDA_ERROR_INVALID_IMAGE" in str(error) and "update the driver" in str(error)
else:
    raise AssertionError("a module that the driver refuses was not reported")
print("all as expected")
