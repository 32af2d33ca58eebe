"""Writes a random model for measurements of time and memory.

    python benchmarks/random_model.py SHAPE FOLDER TOKENIZER

TOKENIZER is a folder whose tokenizer is copied. The shapes:

qwen2-1.5b  Qwen2-1.5B, 1.54 billion weights with 28 layers; --layers for fewer.
qwen3-moe   A smaller Qwen3-30B-A3B: widths are a quarter of that model's, its 128 experts are 32, its 48 layers 2.
            Layers of experts keep their proportions to attention, but for the number of experts: attention has 9 % of
            the parameters, in Qwen3-30B-A3B 3 %.
deepseek-v3-layer  One layer of DeepSeek-V3 in its own widths, with 8 of its 256 experts, of which a token has one:
            0.58 billion weights and the vocabulary.

Rows and columns of the matrices differ in size, by a factor of 1.35 in one standard deviation, as those of trained
models do.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV3Config, Qwen2Config, Qwen3MoeConfig

UNEVENNESS = 0.3
"""Standard deviation of the logarithm of the factors of rows and of columns."""
SHAPES = {
    "qwen2-1.5b": (
        Qwen2Config,
        {
            "hidden_size": 1536,
            "num_hidden_layers": 28,
            "intermediate_size": 8960,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "vocab_size": 151_936,
            "max_position_embeddings": 32_768,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-moe": (
        Qwen3MoeConfig,
        {
            "hidden_size": 512,
            "num_hidden_layers": 2,
            "intermediate_size": 1536,
            "moe_intermediate_size": 192,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 128,
            "vocab_size": 0,
            "max_position_embeddings": 2048,
        },
    ),
    "deepseek-v3-layer": (
        DeepseekV3Config,
        {
            "hidden_size": 7168,
            "num_hidden_layers": 1,
            "first_k_dense_replace": 0,
            "intermediate_size": 18_432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 8,
            "num_experts_per_tok": 1,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "vocab_size": 0,
            "max_position_embeddings": 4096,
        },
    ),
}
"""Class and options of each shape's config. The vocabulary is at least that of the tokenizer."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("tokenizer")
    parser.add_argument("--layers", type=int, help="default: all of the shape")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    kind, sizes = SHAPES[options.shape]
    sizes = {**sizes, "vocab_size": max(len(tokenizer), sizes["vocab_size"])}
    if options.layers:
        sizes["num_hidden_layers"] = options.layers
    config = kind(**sizes, bos_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                rows, cols = parameter.shape[-2:]
                parameter *= (UNEVENNESS * torch.randn(rows, 1)).exp() * (
                    UNEVENNESS * torch.randn(cols)
                ).exp()
    model.save_pretrained(options.folder)
    tokenizer.save_pretrained(options.folder)
    print(f"{options.folder}: {sum(parameter.numel() for parameter in model.parameters()):,} parameters")


if __name__ == "__main__":
    main()
