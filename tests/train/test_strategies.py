"""`ciuic plan`: plans against torch's allocator, deep models from short ones, the table and its exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ciuic_cli.cli.app import app
from ciuic_cli.train.options import TrainOptions
from ciuic_cli.train.planning.layers import Depths, depths_of
from ciuic_cli.train.planning.measured import measure
from ciuic_cli.train.planning.memory_plan import PlannedModel, plan_memory
from ciuic_cli.train.planning.step import Batch, Sharding
from ciuic_cli.train.planning.strategies import strategies
from ciuic_cli.train.sharding.shards import COMM

pytest.importorskip("peft")

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 192,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "max_position_embeddings": 512,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 64,
    "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 9, "first_k_dense_replace": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32, "vocab_size": 500,
    "max_position_embeddings": 512, "torch_dtype": "bfloat16",
}  # fmt: skip


def options(every: int = 0, **chosen: Any) -> TrainOptions:
    checkpointing = {"activation_checkpointing": True, "every_n_layers": every} if every else {}
    return TrainOptions(Path("none"), **checkpointing, **chosen)


@pytest.mark.parametrize(
    ("chosen", "masked", "sharding"),
    [
        (options(method="full", activations="int8"), True, None),
        (options(1, method="full", weights="int8", activations="int8"), False, None),
        (options(1, method="full", gradient_accumulation_steps=2), False, Sharding(2, "bf16")),
        (options(1, method="full", activations="int8"), False, Sharding(2, "int8")),
    ],
)
def test_a_plan_is_what_the_allocator_gives_out(
    tmp_path: Path, chosen: TrainOptions, masked: bool, sharding: Sharding | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    batch = Batch(2, 256, masked)
    plan = plan_memory(PlannedModel.of_folder(tmp_path), chosen, batch, sharding=sharding, whole=False)
    found = measure(tmp_path, chosen, batch, sharding)
    assert plan.tensors + plan.residuals == pytest.approx(found.peak, rel=0.05)
    assert plan.sent == found.sent and (plan.sent > 0) == (sharding is not None)


@pytest.mark.parametrize("family", ["deepseek_v3", "llama"])
def test_a_plan_of_shared_codes_is_what_the_allocator_gives_out(
    artifact: Callable[..., Any], family: str
) -> None:
    folder, batch, processes = artifact(family).folder, Batch(2, 256, masked=False), 2
    model, chosen, sharding = PlannedModel.of_folder(folder), options(1, lora_r=8), Sharding(processes)
    alone, plan = (plan_memory(model, chosen, batch, sharding=one, whole=False) for one in (None, sharding))
    found = measure(folder, chosen, batch, sharding)
    assert plan.tensors == pytest.approx(found.peak, rel=0.05)
    for term in ("weights", "adapter", "states"):
        assert getattr(plan, term) == pytest.approx(getattr(alone, term) / processes, rel=0.02)
    # Codes and adapter are gathered for the forward and the backward pass; only the adapter is summed.
    shares = plan.weights + plan.adapter
    assert shares < plan.sent <= 1.02 * (2 * shares + plan.adapter)
    assert plan.sent == found.sent


@pytest.mark.parametrize(
    ("config", "chosen", "sharding"),
    [
        (LLAMA | {"num_hidden_layers": 11}, options(2, method="full"), None),
        (LLAMA | {"num_hidden_layers": 9}, options(lora_r=4), None),
        (DEEPSEEK, options(1, method="full", activations="int8"), Sharding(4, "int8")),
    ],
)
def test_a_deep_model_is_planned_from_short_ones(
    config: dict[str, Any], chosen: TrainOptions, sharding: Sharding | None
) -> None:
    whole, short = (
        plan_memory(PlannedModel(config), chosen, Batch(2, 64), sharding=sharding, whole=each)
        for each in (True, False)
    )
    assert depths_of(PlannedModel(config).meta_model(), chosen.every_n_layers) is not None
    assert short.tensors == pytest.approx(whole.tensors, rel=1e-3)
    assert short.weights == pytest.approx(whole.weights, rel=1e-6)
    assert short.sent == pytest.approx(whole.sent, rel=1e-6)


def test_the_depths_of_short_models() -> None:
    assert depths_of(PlannedModel(LLAMA).meta_model(), 1) is None  # nothing is saved with two layers
    assert depths_of(PlannedModel(DEEPSEEK).meta_model(), 1) == Depths((5, 6), 9, 1)
    assert depths_of(PlannedModel(LLAMA | {"num_hidden_layers": 30}).meta_model(), 4) == Depths(
        (6, 10), 30, 4
    )


def test_the_bytes_on_the_wire() -> None:
    untied = PlannedModel(LLAMA | {"tie_word_embeddings": False})
    sent = {
        comm: plan_memory(untied, options(method="full"), Batch(1, 64), sharding=Sharding(4, comm)).sent
        for comm in COMM
    }
    embedding, layer, norm = 64 * 1000, 64 * (64 + 2 * 32 + 64) + 3 * 64 * 192 + 2 * 64, 64
    parameters = 2 * embedding + 2 * layer + norm
    # Gathered for the forward and the backward pass, the last norm once; summed once.
    assert sent["fp32"] == 3 * (2 * parameters - norm + parameters)
    assert sent["bf16"] == 3 * (2 * parameters - norm) // 2 + 3 * parameters
    assert sent["int8"] / sent["fp32"] == pytest.approx((1 + 2 / 128) / 4, rel=0.01)  # whole blocks


def test_every_strategy_is_a_run_of_the_train_command() -> None:
    found = strategies(is_artifact=False, rows=4, gpus=[1, 8], rank=8)
    assert len({one.name for one in found}) == len(found)
    for one in found:
        passes = one.options.gradient_accumulation_steps
        assert one.rows * passes == 4 and one.options.per_device_train_batch_size == one.rows
        assert ("--fsdp" in one.command) == (one.processes > 1)
    assert all(one.options.method == "lora" for one in strategies(True, 4, [1, 8], 8))


def test_what_does_not_fit_ends_with_code_4_after_the_table(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    page = tmp_path / "plan.html"
    arguments = ["plan", str(tmp_path), "--gpu-memory", "1MB", "--seqlen", "64", "--rows", "1"]
    result = CliRunner().invoke(app, [*arguments, "--page", str(page), "--json", "--quiet"])
    assert result.exit_code == 4, result.output
    assert "no strategy fits" in result.stderr and "--sequence-len" in result.stderr
    found = json.loads(result.stdout)["strategies"]
    assert len(found) == len(strategies(False, 1, [1], 16)) and not any(one["fits"] for one in found)
    parameters = sum(p.numel() for p in PlannedModel(LLAMA).meta_model(torch.float32).parameters())
    assert found[0]["bytes"]["states"] == 8 * parameters
    text = page.read_text()
    assert text.count('class="line misses"') == len(found) and "scratch" in text


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (["--gpus", "0"], 2),
        (["--gpu-memory", "much"], 2),
        (["--gpu-memory", "24"], 2),  # without its unit
        (["--seqlen", "1"], 2),
    ],
)
def test_wrong_options(tmp_path: Path, wrong: list[str], code: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    result = CliRunner().invoke(app, ["plan", str(tmp_path), "--gpu-memory", "1GB", *wrong])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
