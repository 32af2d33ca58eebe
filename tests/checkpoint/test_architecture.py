"""Faults 26 and 27: no code of a checkpoint runs; unknown architectures and implausible sizes are refused early."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ciuic_cli.checkpoint.architecture import build_config, build_meta_model, layer_prefixes
from ciuic_cli.checkpoint.model_map import map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.errors import InputError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


def refusal(**changes: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        build_config({**LLAMA, **changes}, Path("config.json"))
    assert caught.value.exit_code == 3 and caught.value.file == "config.json" and caught.value.remedy
    return caught.value


def test_26_auto_map_is_never_executed(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(tiny_checkpoint("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    model_map = map_model(open_checkpoint(folder))
    assert type(model_map.meta_model()).__name__ == "LlamaForCausalLM"
    assert not hasattr(model_map.config, "auto_map")
    assert not (tmp_path / "ran").exists()


def test_27_unknown_architecture() -> None:
    assert "'quantum_llm'" in refusal(model_type="quantum_llm").message
    assert "None" in refusal(model_type=None).message
    assert "auto_map" in refusal(model_type="deepseek", auto_map={"AutoConfig": "x.Y"}).message


def test_27_an_encoder_is_refused() -> None:
    assert "causal" in refusal(model_type="vit").message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", -64),
        ("hidden_size", 0),
        ("hidden_size", 1 << 40),
        ("hidden_size", "64"),
        ("hidden_size", 1e300),
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", -1),
        ("vocab_size", 10**12),
        ("intermediate_size", -5),
        ("num_attention_heads", 0),
        ("head_dim", 1 << 50),
        ("num_local_experts", 10**8),
        ("kv_lora_rank", -3),
        ("is_encoder_decoder", True),
    ],
)
def test_27_absurd_or_negative_sizes(key: str, value: Any) -> None:
    started = time.monotonic()
    error = refusal(**{key: value})
    assert key in error.message and time.monotonic() - started < 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sliding_window", 10**30),
        ("sliding_window", -(10**30)),
        ("rope_parameters", {"main": {"factor": 1 << 63}}),
        ("compress_ratios", [4, 1 << 63]),
    ],
)
def test_27_integers_beyond_the_limit(key: str, value: Any) -> None:
    assert str(1 << 40) in refusal(model_type="deepseek_v4", **{key: value}).message


@pytest.mark.parametrize("steps", [10**6, 1 << 63])
def test_27_loop_counts_beyond_the_limit(steps: int) -> None:
    assert "hc_sinkhorn_iters" in refusal(model_type="deepseek_v4", hc_sinkhorn_iters=steps).message
    assert (
        build_config({**LLAMA, "train_iters": 10**6}).train_iters == 10**6
    )  # a key that the model's config class does not have


def test_large_numbers_of_real_models_are_accepted() -> None:
    values = {"rope_theta": 45843689292, "model_max_length": 10**30, "max_position_embeddings": 1 << 24}
    assert build_config({**LLAMA, **values}).max_position_embeddings == 1 << 24


def test_27_what_transformers_itself_refuses_is_an_input_error() -> None:
    assert "transformers refuses" in refusal(num_key_value_heads="many").message
    with pytest.raises(InputError, match="transformers cannot build LlamaForCausalLM: KeyError in Llama"):
        build_meta_model(build_config({**LLAMA, "hidden_act": "nonsense"}), torch.bfloat16)


@pytest.mark.parametrize("per_token", [0, 5])
def test_experts_per_token_are_between_one_and_the_number_of_experts(per_token: int) -> None:
    error = refusal(model_type="mixtral", num_local_experts=4, num_experts_per_tok=per_token)
    assert "num_experts_per_tok" in error.message and "between 1 and" in error.message


def test_return_dict_in_the_config_is_ignored() -> None:
    assert build_config({**LLAMA, "return_dict": False}).return_dict is True


def test_sizes_in_a_nested_text_config_are_checked() -> None:
    error = refusal(model_type="gemma3", text_config={"hidden_size": -1})
    assert "hidden_size" in error.message


def test_the_671b_model_maps_without_memory() -> None:
    """DeepSeek-V3 at its real size: 671 billion weights on the meta device."""
    config = build_config(
        {
            "model_type": "deepseek_v3",
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "vocab_size": 129280,
            "n_routed_experts": 256,
            "first_k_dense_replace": 3,
            "quantization_config": {"quant_method": "fp8"},
        }
    )
    model = build_meta_model(config, torch.bfloat16)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) == 671_026_404_352
    prefixes = layer_prefixes(model, 61)
    assert prefixes[0] == "model.layers.0." and len(prefixes) == 61
