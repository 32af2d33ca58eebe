"""Writes a checkpoint with DeepSeek-V3's config, names and shapes, of which only the headers take space on the disk.

    python benchmarks/deepseek_v3_headers.py build/v3
    ciuic compress build/v3 build/out --dry-run     # prints the forecast, then ends with the plan's first read

The weights are a hole in the file: they read as zeros, in bfloat16, 1.3 TB of them. For forecasts (docs/SCALE.md); the
multi-token-prediction layer is left out.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import struct
from pathlib import Path

SAMPLE = Path(__file__).parent.parent / "samples" / "deepseek-v3-tiny"
HIDDEN, DENSE, EXPERT, EXPERTS, LAYERS, DENSE_LAYERS = 7168, 18432, 2048, 256, 61, 3
HEADS, Q_RANK, KV_RANK, NOPE, ROPE, VALUE, VOCABULARY = 128, 1536, 512, 128, 64, 128, 129280
CONFIG = {
    "hidden_size": HIDDEN, "intermediate_size": DENSE, "moe_intermediate_size": EXPERT, "n_routed_experts": EXPERTS,
    "num_hidden_layers": LAYERS, "first_k_dense_replace": DENSE_LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS, "q_lora_rank": Q_RANK, "kv_lora_rank": KV_RANK, "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE, "v_head_dim": VALUE, "vocab_size": VOCABULARY, "num_experts_per_tok": 8, "n_group": 8,
    "topk_group": 4, "max_position_embeddings": 4096,
}  # fmt: skip
"""From DeepSeek-V3's config.json."""


def mlp_shapes(prefix: str, width: int) -> dict[str, list[int]]:
    """Names and shapes of a gated feed-forward network."""
    return {
        f"{prefix}gate_proj.weight": [width, HIDDEN],
        f"{prefix}up_proj.weight": [width, HIDDEN],
        f"{prefix}down_proj.weight": [HIDDEN, width],
    }


def layer_shapes(layer: int) -> dict[str, list[int]]:
    """Names and shapes of one layer's parameters."""
    prefix = f"model.layers.{layer}."
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    shapes = {
        f"{prefix}input_layernorm.weight": [HIDDEN],
        f"{prefix}post_attention_layernorm.weight": [HIDDEN],
        f"{attention}q_a_layernorm.weight": [Q_RANK],
        f"{attention}kv_a_layernorm.weight": [KV_RANK],
        f"{attention}q_a_proj.weight": [Q_RANK, HIDDEN],
        f"{attention}q_b_proj.weight": [HEADS * (NOPE + ROPE), Q_RANK],
        f"{attention}kv_a_proj_with_mqa.weight": [KV_RANK + ROPE, HIDDEN],
        f"{attention}kv_b_proj.weight": [HEADS * (NOPE + VALUE), KV_RANK],
        f"{attention}o_proj.weight": [HIDDEN, HEADS * VALUE],
    }
    if layer < DENSE_LAYERS:
        return shapes | mlp_shapes(mlp, DENSE)
    shapes |= {f"{mlp}gate.weight": [EXPERTS, HIDDEN], f"{mlp}gate.e_score_correction_bias": [EXPERTS]}
    for expert in range(EXPERTS):
        shapes |= mlp_shapes(f"{mlp}experts.{expert}.", EXPERT)
    return shapes | mlp_shapes(f"{mlp}shared_experts.", EXPERT)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    shapes: dict[str, list[int]] = {
        "model.embed_tokens.weight": [VOCABULARY, HIDDEN],
        "lm_head.weight": [VOCABULARY, HIDDEN],
        "model.norm.weight": [HIDDEN],
    }
    for layer in range(LAYERS):
        shapes |= layer_shapes(layer)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        float32 = name.endswith("e_score_correction_bias")
        begin, end = end, end + math.prod(shape) * (4 if float32 else 2)
        header[name] = {"dtype": "F32" if float32 else "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with (out / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    config = json.loads((SAMPLE / "config.json").read_text()) | CONFIG
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(SAMPLE / name, out)


if __name__ == "__main__":
    main()
