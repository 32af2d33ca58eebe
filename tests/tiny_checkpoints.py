"""Tiny, complete checkpoints of every family, with fixed seeds.

Some dimensions of each family are no multiple of 16, so that every test exercises padding.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 263
"""Tokens: 256 bytes, three special ones and four unused ones. No multiple of 16, to exercise padding."""

TINY_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama_tied": {
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen2": {
        "hidden_size": 40,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
    },
    "mistral": {
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "sliding_window": 16,
    },
    "gemma3": {
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 16,
        "tie_word_embeddings": True,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "mixtral": {
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
    },
    "qwen2_moe": {
        "hidden_size": 48,
        "intermediate_size": 72,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
    },
    "deepseek_v2": {
        "hidden_size": 56,
        "intermediate_size": 88,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 5,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
    },
    "deepseek_v3": {
        "hidden_size": 56,
        "intermediate_size": 88,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 28,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 64,
        },
    },
    "deepseek_v32": {
        "hidden_size": 56,
        "intermediate_size": 88,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 28,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 8,
    },
    "deepseek_v4": {
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 24,
        "q_lora_rank": 28,
        "o_groups": 2,
        "o_lora_rank": 20,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 4,
        "sliding_window": 16,
        "hc_mult": 2,
        "partial_rotary_factor": 8 / 24,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "layer_types": [
            "sliding_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
    },
}

FAMILIES = tuple(TINY_CONFIGS)
_MODEL_TYPES = {"llama_tied": "llama", "gemma3": "gemma3_text"}


def make_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer with VOCABULARY entries. It has a BOS token, which it prepends, and an EOS token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<bos>", "<eos>", "<pad>", *alphabet]
    tokens += [f"<unused{index}>" for index in range(VOCABULARY - len(tokens))]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 0)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(folder)


def make_checkpoint(
    family: str,
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    max_shard_size: str = "5GB",
    **changes: Any,
) -> Path:
    """Write a tiny random checkpoint of `family` in its on-disk layout, with tokenizer; returns `folder`."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    values = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        **TINY_CONFIGS[family],
        **changes,
    }
    config = CONFIG_MAPPING[_MODEL_TYPES.get(family, family)](**values)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _name, tensor in model.state_dict().items():
            if not tensor.is_floating_point():
                tensor.random_(0, getattr(config, "n_routed_experts", 2), generator=generator)
            elif tensor.dim() < 2:
                # Norms and biases get values other than their defaults, so that a test notices a forgotten one.
                noise = torch.rand(tensor.shape, generator=generator) * 0.2
                tensor.add_(noise.to(tensor.dtype))
            else:
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(noise / tensor.shape[-1] ** 0.5)
        for name, parameter in model.named_parameters():
            if name.endswith(
                ".gate.weight"
            ):  # transformers computes routers in float32; published files hold `dtype`
                parameter.data = parameter.to(dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if family == "deepseek_v4":
        _original_v4_names(folder)
    make_tokenizer(folder)
    return folder


def _original_v4_names(folder: Path) -> None:
    """Rename what `save_pretrained` writes for V4 to the names in DeepSeek's own files."""
    from safetensors.torch import load_file, save_file

    def original(name: str) -> str:
        name = (
            name.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
        )
        return name.replace(".attn.norm.", ".attn.kv_norm.")

    for file in folder.glob("*.safetensors"):
        tensors = {original(name): tensor for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text())
        content["weight_map"] = {original(name): file for name, file in content["weight_map"].items()}
        index.write_text(json.dumps(content))
