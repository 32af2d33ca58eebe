"""Which parameters are compressed, and the reasons for the others, on small models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from ciuic_cli.checkpoint.roles import Classification, classify


def roles(model_type: str, **values: Any) -> dict[str, Classification]:
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 96,
    }
    config = CONFIG_MAPPING[model_type](**{**sizes, **values})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: classified for name, (classified, _) in classify(model).items()}


def test_transposed_expert_stacks_are_compressed_as_their_transposes() -> None:
    found = roles("gpt_oss", intermediate_size=96, num_local_experts=4, head_dim=16, num_key_value_heads=2)
    for name in ("gate_up_proj", "down_proj"):
        stack = found[f"model.layers.0.mlp.experts.{name}"]
        assert stack.compress and stack.transposed


@pytest.mark.parametrize("intermediate", [16, 32, 64, 128])
def test_square_looking_expert_stacks_are_compressed(intermediate: int) -> None:
    found = roles(
        "mixtral", intermediate_size=intermediate, num_local_experts=4, num_key_value_heads=2, head_dim=16
    )
    assert found["model.layers.0.mlp.experts.gate_up_proj"].compress
    assert found["model.layers.0.mlp.experts.down_proj"].compress


@pytest.mark.parametrize(
    ("model_type", "layer"), [("gpt_neox", "gpt_neox.layers.0."), ("falcon", "transformer.h.0.")]
)
def test_older_names_have_the_same_roles(model_type: str, layer: str) -> None:
    found = {name.removeprefix(layer): classified for name, classified in roles(model_type).items()}
    assert {classified.role for classified in found.values()} == {
        "bias", "down", "embedding", "head", "norm", "o", "qkv", "up"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "compress"), [(1, False), (2, False), (4, False), (8, True), (16, True), (63, True)]
)
def test_a_matrix_that_padding_would_inflate_stays_dense(rows: int, compress: bool) -> None:
    """V3.2's `weights_proj` has one row per indexer head: 64 in the real model, few in a tiny one."""
    found = roles(
        "deepseek_v32",
        index_n_heads=rows,
        index_head_dim=16,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=8,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=32,
        first_k_dense_replace=0,
    )
    weight = found["model.layers.0.self_attn.indexer.weights_proj.weight"]
    assert weight.role == "indexer" and weight.compress == compress
    assert ("would not shrink" in weight.reason) != compress


def test_routers_norms_biases_and_buffers_stay_dense() -> None:
    found = roles("qwen2_moe", num_experts=4, num_key_value_heads=2, moe_intermediate_size=32)
    assert found["model.layers.0.mlp.gate.weight"] == Classification(
        "router", False, "router: it decides which expert sees a token, kept exactly"
    )
    assert found["model.layers.0.self_attn.q_proj.bias"].role == "bias"
    assert found["model.norm.weight"].role == "norm"
    assert found["model.layers.0.mlp.shared_expert_gate.weight"].role == "shared_expert_router"
    assert all(classified.reason for classified in found.values() if not classified.compress)


class _Positions(nn.Embedding):
    """An embedding with an offset, like OPT's learned positions."""

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return super().forward(positions + 2)


class _Halved(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 2


class _Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def test_a_linear_inside_a_router_is_a_router() -> None:
    """LongCat-Flash's router has a linear of its own."""
    found = roles(
        "longcat_flash", num_hidden_layers=2, n_routed_experts=32, zero_expert_num=4, ffn_hidden_size=96
    )
    classifier = found["model.layers.0.mlp.router.classifier.weight"]
    assert classifier.role == "router" and not classifier.compress


def test_modules_with_code_of_their_own_are_compressed_where_it_shows_the_product() -> None:

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain, self.halved, self.gain = nn.Linear(64, 64), _Halved(64, 64), _Gain()
            self.tokens, self.positions = nn.Embedding(64, 64), _Positions(64, 64)

        def get_output_embeddings(self) -> None:
            return None

    found = {name: classified for name, (classified, _) in classify(Model()).items()}
    assert found["plain.weight"].compress and found["tokens.weight"].compress
    assert found["halved.weight"].compress and found["positions.weight"].compress
    assert not found["gain.weight"].compress and "used by _Gain directly" in found["gain.weight"].reason
