"""Writes a random Qwen3-MoE model, a smaller Qwen3-30B-A3B: `python benchmarks/random_moe.py FOLDER TOKENIZER`.

Widths are a quarter of that model's, its 128 experts are 32, its 48 layers 2; TOKENIZER is a folder whose tokenizer is
copied. Layers of experts keep their proportions to attention, but for the number of experts: attention has 9 % of the
parameters, in Qwen3-30B-A3B 3 %.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("tokenizer")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    config = Qwen3MoeConfig(
        hidden_size=512, num_hidden_layers=2, intermediate_size=1536, moe_intermediate_size=192, num_experts=32,
        num_experts_per_tok=4, num_attention_heads=8, num_key_value_heads=1, head_dim=128, vocab_size=len(tokenizer),
        max_position_embeddings=2048,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(options.folder)
    tokenizer.save_pretrained(options.folder)
    print(f"{options.folder}: {sum(parameter.numel() for parameter in model.parameters()):,} parameters")


if __name__ == "__main__":
    main()
