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
    """Whether bfloat16 products are faster than float32 ones (twice as fast on recent processors)."""
    import torch

    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
