"""Tiny random checkpoints of any causal language model class of transformers, made from its own configuration class.

`SIZES` shrinks every size that a configuration has. `CHANGES` has what a family needs besides: sizes that depend on
each other, and layer types that a model of a few layers would not have.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_checkpoints import VOCABULARY, make_tokenizer

MAX_PARAMETERS = 4_000_000
"""A larger model would take minutes."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
    "ffn_dim": 96,
    "word_embed_proj_dim": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "shared_intermediate_size": 48,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "rotary_dim": 8,
    "dff": 96,
    "o_lora_rank": 16,
    "o_groups": 2,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 1,
    "lru_width": 64,
    "attention_hidden_size": 64,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCABULARY,
    "moe_num_experts": 4,
    "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 32,
    "num_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 48,
    "image_token_id": 260,
    "image_token_index": 260,
    "audio_token_id": 259,
    "video_token_id": 258,
    "v_head_dim": 16,
    "sliding_window": 16,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 64,
    "state_size": 16,
    "time_step_rank": 16,
    "mamba_d_state": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_dt_rank": 16,
    "mamba_chunk_size": 16,
    "chunk_size": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
"""Applied where the configuration has the key."""

VISION: dict[str, Any] = {
    "out_hidden_size": 64,
    "output_channels": 16,
    "output_dim": 64,
    "vision_output_dim": 64,
    "projector_input_dim": 64,
    "projector_output_dim": 64,
    "projection_dim": 64,
    "mlp_dim": 16,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "depth": 1,
    "embed_dim": 16,
    "num_heads": 2,
    "head_dim": 8,
    "image_size": 16,
    "patch_size": 4,
    "num_position_embeddings": 16,
}
"""The same in a vision section."""

_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
"""Rotary angles of 8 pairs, by time, height and width of an image."""
CHANGES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "mamba_d_state": 16},
    "falcon": {"head_dim": None},
    "falcon_h1": {"mamba_d_ssm": 128},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_hidden_layers": None},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": [96] * 4,
        "laurel_rank": 16,
    },
    "gemma4_text": {
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "q_lora_rank": None, "topk_method": "greedy"},
    "deepseek_v4": {"hc_mult": 2, "hidden_size": 128, "mlp_layer_types": ["hash_moe", "moe", "moe"]},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "bailing_hybrid": {"layer_group_size": 2},
    "electra": {"embedding_size": 64},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "zamba2": {
        "layer_types": None,
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "num_mem_blocks": 1,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "moe"]},
    "hy_v4": {"hidden_size": 128, "hc_mult": 2},
    "got_ocr2": {"text_config": {"hidden_size": 192, "intermediate_size": 256}},
    "zamba": {
        "hidden_size": 256,
        "attention_hidden_size": 512,
        "attention_head_dim": 128,
        "layers_block_type": ["mamba", "hybrid", "mamba"],
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 3,
        "max_seq_len": 256,
    },
    "fuyu": {"patch_size": 4},
    "gemma3": {"mm_tokens_per_image": 4},
    **{
        family: {"text_config": {"rope_parameters": _MROPE}}
        for family in ("qwen2_5_vl", "glm4v", "glm4v_moe", "glm46v", "glmga", "glm_ocr")
    },
    "qwen2_vl": {"text_config": {"rope_parameters": _MROPE}, "vision_config": {"hidden_size": 64}},
    "deepseek_vl_hybrid": {"text_config": {"intermediate_size": 512}},
    "internvl": {"text_config": {"intermediate_size": 512}},
    "paligemma": {"text_config": {"intermediate_size": 512}},
    "mllama": {"text_config": {"intermediate_size": 512}},
    "qwen3_vl": {"vision_config": {"deepstack_visual_indexes": [0]}},
    "qwen3_vl_moe": {"vision_config": {"deepstack_visual_indexes": [0]}},
    "minimax": {"block_size": 16},
    "xmod": {"default_language": "en_XX"},
    "rwkv": {"context_length": 64},
    "longcat_flash": {"num_layers": 2, "zero_expert_num": 2},
}
"""By model type: more values, or a section's values under the section's name."""


def tiny_config(model_type: str, **options: Any) -> Any:
    """A configuration of the class that transformers has for `model_type`, with tiny sizes and these options."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    plain = kind()
    changes = dict(CHANGES.get(model_type, {}))
    values = _sizes(plain, SIZES)
    for section, section_kind in (getattr(kind, "sub_configs", None) or {}).items():
        part = getattr(plain, section, None)
        if part is None:
            continue
        is_text = "text" in section or "language" in section or "llm" in section
        values[section] = {
            "model_type": getattr(section_kind, "model_type", None) or part.model_type,
            **_sizes(part, SIZES | {"intermediate_size": 256} if is_text else VISION),
            **changes.pop(section, {}),
        }
    values.update(changes)
    return kind(**{key: value for key, value in values.items() if value is not None} | options)


def _sizes(config: Any, sizes: dict[str, Any]) -> dict[str, Any]:
    aliases, plain = getattr(type(config), "attribute_map", {}), config.to_dict()
    attribute = aliases.get("layer_types", "layer_types")
    computed = isinstance(getattr(type(config), attribute, None), property)
    hybrid = not computed and "linear_attention" in (_value(config, "layer_types") or ())
    layers = ["linear_attention", "full_attention", "linear_attention"]
    return (
        ({"layer_types": layers} if hybrid else {})
        | {
            key: value
            for key, value in sizes.items()
            if isinstance(_value(config, key), (int, float))
            or (key.endswith("token_id") and key in plain)
            or (key in aliases and aliases[key] in plain)
        }
        | ({"num_key_value_heads": sizes["num_attention_heads"]} if _value(config, "kv_lora_rank") else {})
    )


def _value(config: Any, key: str) -> Any:
    try:
        return getattr(config, key, None)
    except Exception:  # transformers' own error for a value that differs from layer to layer
        return None


@torch.no_grad()
def make_family(model_type: str, folder: Path, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Path:
    """Write a tiny random checkpoint with a tokenizer; returns `folder`. options: of its configuration."""
    from transformers.models.auto import modeling_auto

    torch.manual_seed(0)
    config = tiny_config(model_type, **options)
    with_tower = model_type in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    auto: Any = (
        modeling_auto.AutoModelForImageTextToText if with_tower else modeling_auto.AutoModelForCausalLM
    )
    with torch.device("meta"):
        size = sum(p.numel() for p in auto.from_config(config).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"{size:,} parameters: SIZES and CHANGES leave a part of it large")
    model = auto.from_config(config, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and not name.endswith(("A_log", "conv1d.weight")):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise / parameter.shape[-1] ** 0.5)
        elif parameter.dim() == 1 and parameter.is_floating_point():
            parameter.add_((torch.rand(parameter.shape, generator=generator) * 0.1).to(parameter.dtype))
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder
