"""Instructions of the processor, and the environment's limit of them."""

from __future__ import annotations

import pytest
import torch

from ciuic_cli.process.processor import has_instructions

NAMES = ("avx2", "avx512_f", "avx512_bf16", "amx_bf16")


@pytest.mark.parametrize(
    ("limit", "left"),
    [
        ("ALL", NAMES),
        ("avx512_core_amx", NAMES),
        ("AVX512_CORE_BF16", NAMES[:3]),
        ("AVX512_CORE_VNNI", NAMES[:2]),
        ("AVX2", NAMES[:1]),
        ("SSE41", ()),
    ],
)
def test_a_limit_of_instructions_counts(
    monkeypatch: pytest.MonkeyPatch, limit: str, left: tuple[str, ...]
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(NAMES, True))
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    has_instructions.cache_clear()
    try:
        assert tuple(name for name in NAMES if has_instructions(name)) == left
        assert not has_instructions("neon")
    finally:
        has_instructions.cache_clear()
