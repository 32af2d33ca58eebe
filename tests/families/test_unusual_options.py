"""Options of configurations that few released models use, at 4:1, each compared with its dense model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from family_table import try_family

UNUSUAL: dict[str, tuple[str, dict[str, Any]]] = {
    "dense layers between layers of experts, biases, windows above the first layer, a tied head": (
        "qwen3_moe",
        {
            "decoder_sparse_step": 2, "mlp_only_layers": [2], "attention_bias": True, "norm_topk_prob": True,
            "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "tie_word_embeddings": True,
        },
    ),
    "norms of queries and keys, few rotated dimensions, groups of experts": (
        "glm4_moe",
        {
            "use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 0.25, "n_group": 2,
            "topk_group": 1, "n_shared_experts": 2, "routed_scaling_factor": 2.5, "first_k_dense_replace": 0,
        },
    ),
    "caps of scores and logits, heads wider than the hidden size, a head of its own": (
        "gemma2",
        {
            "head_dim": 24, "query_pre_attn_scalar": 7, "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0, "tie_word_embeddings": False,
        },
    ),
    "attention beside the perceptron, a norm for each head": (
        "stablelm",
        {
            "qk_layernorm": True, "use_parallel_residual": True, "partial_rotary_factor": 0.5,
            "use_qkv_bias": True,
        },
    ),
    "two attention blocks that four layers share, with adapters": (
        "zamba2",
        {
            "num_hidden_layers": 9, "layers_block_type": ["mamba", "hybrid"] * 4 + ["mamba"], "num_mem_blocks": 2,
            "use_shared_attention_adapter": True, "adapter_rank": 16, "num_key_value_heads": 4,
        },
    ),
    "compressed queries off, attention biases, two groups of experts": (
        "deepseek_v3",
        {
            "q_lora_rank": None, "attention_bias": True, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 2,
            "rope_interleave": False, "norm_topk_prob": False,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNUSUAL)
def test_an_unusual_option_is_as_exact_as_its_dense_model(case: str, tmp_path: Path) -> None:
    family, options = UNUSUAL[case]
    result = try_family(family, tmp_path, **options)
    assert result.code == 0, result.reason
    assert result.works, result.difference
    assert result.share > 0.95 and result.ratio >= 4.0
