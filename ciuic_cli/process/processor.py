"""Facts about the processor. torch is imported late: one of them is asked for before torch may be loaded."""

from __future__ import annotations

import functools
from pathlib import Path


def is_intel() -> bool:
    """Whether Linux names Intel as the vendor; False where that is unknown."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether bfloat16 products are faster than float32 ones.

    They are twice as fast or more with a matrix unit (AMX), on AMD's processors with AVX512_BF16, and on ARM's. Intel's
    vector units multiply bfloat16 at half of float32's rate, which counts where a virtual machine hides AMX (measured:
    docs/experiments/statistics/faster-moments.md).
    """
    import torch

    capabilities = torch.cpu.get_capabilities()
    names = ("amx_bf16", "bf16") if is_intel() else ("amx_bf16", "bf16", "avx512_bf16")
    return any(capabilities.get(name) for name in names)
