"""A memory report in its JSON form, as test input: every kind of component, all passes but recovery."""

from __future__ import annotations

from typing import Any

REPORT: dict[str, Any] = {
    "parameters": 1_234_567,
    "original_bytes": 2_469_134,
    "source_file_bytes": 2_480_000,
    "artifact_bytes": 615_000,
    "budget_bytes": 617_283,
    "ratio": 4.0149,
    "ratio_to_source_files": 4.0325,
    "bits_per_weight": 3.9852,
    "predicted_kl": 0.01234,
    "measured_kl": 0.02345,
    "measured_kl_stderr": 0.00123,
    "components": [
        {"name": "model.embed_tokens.weight", "role": "embedding", "shape": [512, 64], "parameters": 32768,
         "bytes": 24576, "bits": 6.0, "widths": {"6": 32}, "rank": 0, "pruned": 0.0, "predicted_kl": 0.004},
        {"name": "model.layers.0.mlp.experts.down_proj", "role": "expert_down", "shape": [2, 64, 64],
         "parameters": 8192, "bytes": 3072, "bits": 3.0, "widths": {"0": 4, "5": 4}, "rank": 0, "pruned": 0.5,
         "predicted_kl": 0.005, "experts": [
             {"bits": 5.5, "pruned": False, "tokens": 9, "predicted_kl": 0.001},
             {"bits": 0.0, "pruned": True, "tokens": 0, "predicted_kl": 0.004}]},
        {"name": "model.layers.10.self_attn.o_proj.weight", "role": "o", "shape": [64, 64], "parameters": 4096,
         "bytes": 64, "bits": 0.125, "widths": {"0": 4}, "rank": 0, "pruned": 1.0, "predicted_kl": 0.00334},
        {"name": "model.layers.2.self_attn.o_proj.weight", "role": "o", "shape": [64, 64], "parameters": 4096,
         "bytes": 2176, "bits": 4.25, "widths": {"4": 4}, "rank": 16, "pruned": 0.0, "predicted_kl": 0.001},
        {"name": "model.norm.weight", "role": "norm", "shape": [64], "parameters": 64, "bytes": 128, "bits": 16.0,
         "rank": 0, "pruned": 0.0, "predicted_kl": 0.0, "dense": "norm: one number per channel"},
    ],
    "passes": [
        {"name": "prune", "weights": 77_000, "structures": 3, "bytes": 0},
        {"name": "lowrank", "matrices": 5, "bytes": 4096},
        {"name": "bits", "sorted_matrices": 3, "scaled_matrices": 2, "bytes": 600_000, "predicted_kl": 0.01234},
    ],
    "padding": {"matrices": 2, "weights": 640, "bytes": 320},
    "statistics": {"tokens": 4321, "held_out_tokens": 512, "experts_without_tokens": 7, "singular_hessians": 0,
                   "roles": {
        "o": {"predicted_kl": 0.00111, "measured_kl": 0.00222, "correction": 2.0}}},
    "warnings": ["the tied head differs from the embedding"],
    "mtp": {"kept": False, "layers": [{"name": "model.layers.61", "tensors": 9, "bytes": 4096}], "stored_tensors": 0,
            "shared": {}, "parameters": 0, "bytes": 0},
    "dropped": ["layer 61: multi-token prediction"],
    "kept": [],
    "options": {"ratio": 4.0, "seed": 0},
    "seconds": 12.0,
    "peak_rss_bytes": 500_000_000,
}  # fmt: skip
